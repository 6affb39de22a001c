"""A thread that runs calls one after the other, for a device whose work takes the processor itself."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class OrderedWorker:
    """Runs what is submitted strictly in that order.

    It is a daemon thread, unlike those of `ThreadPoolExecutor`: a call that never returns must not keep the process
    from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues a call. Its result or exception is the future's."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Ends the thread after what is submitted, without waiting for it."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # it belongs to the one who waits for the result
                future.set_exception(error)
            del item, future, call  # what they hold must not live until the next call comes
