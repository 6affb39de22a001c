"""The threads that drive the device: one launches steps, another collects their results.

    launch    |step 0||step 1|           |step 2|
    device           |---- step 0 ----||---- step 1 ----||---- step 2 ----|
    collect                             |step 0|          |step 1|          |step 2|

A step is launched while the one before it runs, so the device never waits for the host between two steps; its result
goes out as soon as it is there, whether or not another step comes. Whatever else concerns the device, from loading to
voiding its memory, runs on one of the two threads, so that the event loop keeps parsing and answering health checks.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class DeviceThread:
    """Runs calls one after the other, strictly in the order of posting. Any thread may post.

    It is a daemon thread: a call that never returns does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: Callable[[], object]) -> None:
        """Runs a call after those posted before it. It must not raise; there is nobody to tell."""
        self._calls.put(call)

    async def call(self, function: Callable[[], T]) -> T:
        """As `post`, and waits for the result or the exception. A wait that is cancelled leaves the call to run."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, error = None, None
            try:
                result = function()
            except BaseException as raised:  # it belongs to the one who waits
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(settle, result, error)

        self.post(run)
        return await done

    def stop(self) -> None:
        """Ends the thread after what is posted."""
        self._calls.put(None)

    def has_ended(self, timeout_s: float) -> bool:
        """Waits for the end after a `stop`. False when a call takes longer."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it holds must not live until the next one comes


class DeviceThreads:
    """Both threads.

    Attributes:
        launching: does what comes before a step runs, and what happens while none does.
        collecting: waits for steps.
    """

    def __init__(self) -> None:
        self.launching = DeviceThread("launching")
        self.collecting = DeviceThread("collecting")

    def start(self) -> None:
        self.launching.start()
        self.collecting.start()

    async def call_when_idle(self, function: Callable[[], T]) -> T:
        """Runs a call once every step that was posted is launched and collected, or skipped."""
        await self.launching.call(_nothing)
        return await self.collecting.call(function)

    def stop(self, timeout_s: float) -> bool:
        """Ends both threads. False when one of them still works after `timeout_s`."""
        self.launching.stop()
        self.collecting.stop()
        return self.launching.has_ended(timeout_s) and self.collecting.has_ended(timeout_s)


def _nothing() -> None:
    """Done when everything before it is."""
