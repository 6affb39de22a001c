"""Calls that are no generation, such as Tokenize: a drain waits for them too, and a stop ends them with its reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from holdback.errors import HoldbackError


class ShortCalls:
    """Those that are being answered."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: HoldbackError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """A call, which the current task answers. Raises the error that `fail_all` ends it with."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - coroutines run in tasks
        self._tasks.add(task)
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            task.uncancel()
            raise self._failure from None
        finally:
            self._tasks.discard(task)
            if not self._tasks:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when there is none."""
        await self._idle.wait()

    def fail_all(self, error: HoldbackError) -> None:
        """Ends every one that is still being answered."""
        self._failure = error
        for task in self._tasks:
            task.cancel()
