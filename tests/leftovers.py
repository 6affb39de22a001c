"""Processes of Holdback that a test which failed has started and not ended."""

from __future__ import annotations

import os
import pathlib
import signal

MARK = b"holdback.cli"
"""In the command line of all of them; other children, such as the workers of a compiler, are there for later tests."""


def running() -> set[int]:
    """Our children by process id; none where there is no /proc."""
    found = set()
    for path in pathlib.Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        try:
            pids = map(int, path.read_text().split())
            found |= {pid for pid in pids if MARK in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()}
        except OSError:  # a thread or a process that has just ended
            continue
    return found


def end(pids: set[int]) -> None:
    """Kills processes at once, for nobody will ask them to stop any more."""
    for pid in pids:
        print(f"process {pid} was left behind and is ended")
        os.kill(pid, signal.SIGKILL)
