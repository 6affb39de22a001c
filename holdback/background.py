"""An event loop in a thread of its own, for code that is not asynchronous.

Nothing here takes a lock that is held while Python code runs. So a signal handler may call all of it, `stop` too,
whatever line of the same thread it interrupts: what is handed to the loop is begun in the order in which it was handed
over, and who is to wait does so until the loop's thread says that it may go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from holdback.errors import RequestAbortedError
from holdback.forks import Owner

T = TypeVar("T")
CleanUp = Callable[[], Coroutine[Any, Any, None]]
END_S = 10.0
JOIN_S = 0.1
"""For a thread whose work is over. Its end wants a lock of `threading`, and a signal handler that waits for it may have
interrupted whoever holds that."""
LINGER_S = 0.05


class LoopThread:
    """Runs coroutines for other threads, until it is stopped, nothing refers to it, or the interpreter exits.

    A process that is forked from this one inherits it without its thread. There `run` is refused, and nothing else does
    anything.
    """

    def __init__(self, name: str) -> None:
        self._loop = _Loop(name)
        weakref.finalize(self, self._loop.stop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the waiting thread is interrupted.

        Raises:
            RequestAbortedError: the loop was stopped, before or while this waits, or belongs to another process.
        """
        call = _Call(work)
        try:
            self._loop.check()
            self._loop.call_soon(functools.partial(self._loop.begin, call))
            if self._loop.is_stopping:
                # Perhaps too late for the loop to take it up: only when that has ended is it certain that it will not.
                self._loop.stop()
                self._loop.check()
            return call.result()
        except BaseException:
            # An interrupt may have come before the work began, and even before it was handed over.
            if not self._loop.call_soon(functools.partial(self._loop.cancel, call)):
                work.close()
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls a function in the loop's thread, and does not wait for it. Does nothing once that has ended."""
        self._loop.call_soon(function)

    def before_stop(self, clean_up: CleanUp) -> None:
        """Has a coroutine function called before the loop ends, however that happens. It must not refer to this."""
        self._loop.clean_ups.append(clean_up)

    def stop(self) -> None:
        """Cleans up, cancels what still runs, and ends the thread. Does nothing the second time."""
        self._loop.stop()


class _Loop:
    """The loop and its thread. It does not refer to the LoopThread, whose end is its own.

    Attributes:
        clean_ups: called before the loop ends.
        is_stopping: set before the loop is told to end, so what was handed over while it was not set will be found.
    """

    def __init__(self, name: str) -> None:
        self.clean_ups: list[CleanUp] = []
        self.is_stopping = False
        self._owner = Owner()
        self._has_cut = False  # work that ran, now or at any time before
        self._waiting: list[queue.SimpleQueue[None]] = []
        self._ending: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        # Of its own accord a thread would keep the interpreter from exiting, before any clean-up could stop it.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises RequestAbortedError when nothing can be run any more, or not in this process."""
        self._owner.check()
        if self.is_stopping:
            raise RequestAbortedError("the client is closed")

    def call_soon(self, function: Callable[[], object]) -> bool:
        """Calls a function in the loop's thread. False when there is none, or not in this process."""
        if not self._owner.is_here:
            return False
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # closed
            return False
        return True

    def begin(self, call: _Call[Any]) -> None:
        """In the loop's thread. What comes too late for the ending to find it is not begun: its caller is told."""
        if self._ending is None:
            call.begin()

    def cancel(self, call: _Call[Any]) -> None:
        """In the loop's thread."""
        self._has_cut |= call.cancel()

    def stop(self) -> None:
        """Ends the loop, and waits until it has ended. May be called again, and while it is being called."""
        if not self._owner.is_here:
            return
        self.is_stopping = True
        ended = queue.SimpleQueue[None]()
        self._waiting.append(ended)
        # The last reference may be dropped in the thread itself, by the garbage collector; it cannot wait for itself.
        if self.call_soon(self._begin_to_end) and self._thread is not threading.current_thread():
            with contextlib.suppress(queue.Empty):
                ended.get(timeout=END_S)
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()
            for ended in self._waiting:
                ended.put(None)

    def _begin_to_end(self) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end())
            self._ending.add_done_callback(lambda _: self._loop.stop())

    async def _end(self) -> None:
        self._has_cut |= len(asyncio.all_tasks()) > 1
        for clean_up in self.clean_ups:
            await clean_up()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._has_cut:
            # What gRPC's core still says of calls that were cut finds this loop, else another one's log would have it.
            await asyncio.sleep(LINGER_S)


class _Call(Generic[T]):
    """Work for the loop, which can be cancelled whether or not it has begun."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._is_cancelled = False
        # No Future, nor Event: the loop's thread would wait for their locks, and a signal handler that stops the loop
        # may have interrupted the thread that holds them.
        self._ended = queue.SimpleQueue[asyncio.Task[T]]()

    def begin(self) -> None:
        """In the loop's thread."""
        if not self._is_cancelled:
            self._task = asyncio.get_running_loop().create_task(self._work)
            self._task.add_done_callback(self._ended.put)

    def cancel(self) -> bool:
        """In the loop's thread. False if there was nothing to cut: the work had not begun, or had ended."""
        self._is_cancelled = True
        if self._task is None:
            self._work.close()
            return False
        return self._task.cancel()

    def result(self) -> T:
        """Waits for it, in another thread. Raises what the work raised, or RequestAbortedError if it was cancelled."""
        task = self._ended.get()
        if task.cancelled():
            raise RequestAbortedError("the client was closed")
        return task.result()
