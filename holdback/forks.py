"""What belongs to one process and is of no use in another that was forked from it.

A fork copies the memory and one thread. Connections, event loops and gRPC's core are left there without the threads
that serve them: to wait for them is to wait for ever, and to end them may crash.
"""

from __future__ import annotations

import os

from holdback.errors import RequestAbortedError


class Owner:
    """The process that makes this object."""

    def __init__(self) -> None:
        self._process_id = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._process_id

    def check(self) -> None:
        """Raises RequestAbortedError in any other process."""
        if not self.is_here:
            raise RequestAbortedError(
                f"the client is that of process {self._process_id} and does not work in process {os.getpid()}, which "
                "was forked from it; start processes with spawn, or fork before there is a client"
            )
