"""Progress on a terminal. Where standard error is none, log lines say the same, and no bar is made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class ProgressBar:
    """A bar below the log lines. Use it as a context manager.

    Args:
        total: of what.
        unit: its name, for example `graph`.
    """

    def __init__(self, total: int, unit: str) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm  # makes locks and a thread, for a terminal alone

            self._bar = tqdm(total=total, unit=unit, leave=False, dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, log_line: Callable[[], object]) -> None:
        """Moves on by one, below what `log_line` writes."""
        if self._bar is None:
            log_line()
            return
        self._bar.clear()
        log_line()
        self._bar.update()
        self._bar.refresh()
