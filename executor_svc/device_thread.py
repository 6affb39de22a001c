"""The one thread that drives the device.

What is posted runs strictly in the order of posting, so the event loop keeps parsing and answering health checks while
a step or a warm-up takes its time. It is a daemon thread: a step that never returns does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class DeviceThread:
    """Runs calls one after the other. `post` and `call` may be used from any thread that `call`'s loop runs on."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._busy_since_s: float | None = None

    @property
    def busy_s(self) -> float:
        """How long the call that runs now has run; 0 when none does. What a watchdog of steps looks at."""
        since = self._busy_since_s
        return 0.0 if since is None else time.monotonic() - since

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

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._busy_since_s = time.monotonic()
            call()
            self._busy_since_s = None
            del call  # what it holds must not live until the next one comes
