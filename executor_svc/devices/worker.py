"""A thread that runs calls one after the other, for a device whose work takes the processor itself."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from executor_svc.device_thread import DeviceThread

T = TypeVar("T")


class OrderedWorker:
    """Runs what is submitted strictly in that order, on a daemon thread of its own.

    Not a `ThreadPoolExecutor`, whose threads are waited for: a call that never returns must not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._thread = DeviceThread(name)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queues a call. Its result or exception is the future's."""
        future: Future[T] = Future()
        self._thread.post(partial(_settle, future, call))
        return future

    def close(self) -> None:
        """Ends the thread after what is submitted, without waiting for it."""
        self._thread.stop()


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # it belongs to the one who waits for the result
        future.set_exception(error)
