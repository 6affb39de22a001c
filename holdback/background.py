"""An event loop in a thread of its own, for code that is not asynchronous."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from holdback.errors import RequestAbortedError

T = TypeVar("T")
CleanUp = Callable[[], Coroutine[Any, Any, None]]
JOIN_S = 10.0
LINGER_S = 0.05


class LoopThread:
    """Runs coroutines for other threads, until it is stopped, nothing refers to it, or the interpreter exits."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # Of its own accord a thread would keep the interpreter from exiting, before any clean-up could stop it.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._clean_ups: list[CleanUp] = []
        self._lock = threading.Lock()
        self._is_stopped = False
        self._stop = weakref.finalize(self, _stop, self._loop, self._thread, self._clean_ups)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the waiting thread is interrupted.

        Raises:
            RequestAbortedError: the loop was stopped, before or while this waits.
        """
        call = _Call(work)
        try:
            with self._lock:  # so that what is handed over is there when `stop` looks for what still runs
                if self._is_stopped:
                    work.close()
                    raise RequestAbortedError("the client is closed")
                self._loop.call_soon_threadsafe(call.begin)
            return call.future.result()
        except concurrent.futures.CancelledError:
            raise RequestAbortedError("the client was closed") from None
        except BaseException:
            # An interrupt may have come before the work began, and even before it was handed over.
            self.call_soon(call.cancel)
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls a function in the loop's thread, and does not wait for it. Does nothing once stopped."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def before_stop(self, clean_up: CleanUp) -> None:
        """Has a coroutine function called before the loop ends, however that happens. It must not refer to this."""
        self._clean_ups.append(clean_up)

    def stop(self) -> None:
        """Cleans up, cancels what still runs, and ends the thread. Does nothing the second time."""
        with self._lock:
            self._is_stopped = True
        self._stop()


class _Call(Generic[T]):
    """Work for the loop, which can be cancelled whether or not it has begun; another thread waits for `future`."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._is_cancelled = False

    def begin(self) -> None:
        """In the loop's thread."""
        if not self._is_cancelled:
            self._task = asyncio.get_running_loop().create_task(self._work)
            self._task.add_done_callback(self._hand_over)

    def cancel(self) -> None:
        """In the loop's thread."""
        self._is_cancelled = True
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()

    def _hand_over(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.future.cancel()
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, clean_ups: list[CleanUp]) -> None:
    ending = asyncio.run_coroutine_threadsafe(_end(clean_ups), loop)
    ending.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    # The last reference may be dropped in the thread itself, by the garbage collector; it cannot wait for itself.
    if thread is not threading.current_thread():
        thread.join(JOIN_S)
        if not thread.is_alive():
            loop.close()


async def _end(clean_ups: list[CleanUp]) -> None:
    was_busy = len(asyncio.all_tasks()) > 1
    for clean_up in clean_ups:
        await clean_up()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if was_busy:
        # What gRPC's core still says of the calls that were cut finds this loop, else another one's log would have it.
        await asyncio.sleep(LINGER_S)
