"""The one place where the service reads time. Tests put a clock of their own here and turn it by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A callback that will run once, unless it is cancelled."""

    def cancel(self) -> None: ...


class Clock:
    """The event loop's monotonic clock, in seconds, and its timers."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def unix_us(self) -> int:
        """Wall time, for people only; nothing is decided by it."""
        return time.time_ns() // 1000

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, callback)
