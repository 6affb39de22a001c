"""A process that ends with the one that started it, however that one went."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = (
    "HOLDBACK_PARENT_PID"  # in the environment of processes that are to end with the one that started them
)

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Asks Linux to send this process a signal when its parent is gone. Nothing happens without `PARENT_VARIABLE`.

    Linux takes the thread that started this process for its parent, so that thread must live as long as this process
    is to.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):
        sys.exit("the process that started this one has ended")
