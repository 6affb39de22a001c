"""How much text may wait for its turn, so that a gateway that is sent more than it can work off keeps its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from holdback.errors import ResourceExhaustedError

RETRY_AFTER_S = 1.0


class Backlog:
    """What waits for one kind of work, and what is under way."""

    def __init__(self, work: str, max_chars: int) -> None:
        """
        Args:
            work: for people, for example "tokenized".
            max_chars: of all texts together; one text alone may have more.
        """
        self._work = work
        self._max_chars = max_chars
        self._num_chars = 0

    @contextlib.contextmanager
    def holding(self, num_chars: int) -> Iterator[None]:
        """While a text of this size waits or is worked on. Raises ResourceExhaustedError when there is too much."""
        if self._num_chars and self._num_chars + num_chars > self._max_chars:
            raise ResourceExhaustedError(
                f"{self._num_chars} characters wait to be {self._work} and {num_chars} would be added; "
                f"allowed: {self._max_chars} at once",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_chars += num_chars
        try:
            yield
        finally:
            self._num_chars -= num_chars
