"""How many processors this process may use, and so how many threads compute where nobody says."""

from __future__ import annotations

import os
import pathlib

from executor_svc.control_groups import find_control_groups, read_text

MAX_DEFAULT_THREADS = 16
"""A decode step reads all weights once: from some number of threads on memory is what it waits for."""


def count_processors(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Those that this process may run on, or fewer where its control group has less time; at least 1.

    Args:
        root: of the file system, another one in tests.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    for group in find_control_groups("cpu", root):
        quota, period = _read_quota(group)
        if quota > 0 and period > 0:
            count = min(count, -(-quota // period))
    return max(1, count)


def default_num_threads() -> int:
    """All processors, up to `MAX_DEFAULT_THREADS`. The services beside need little and a thread may wait for them."""
    return min(count_processors(), MAX_DEFAULT_THREADS)


def _read_quota(group: pathlib.Path) -> tuple[int, int]:
    """Microseconds of processor time in each period of microseconds; 0 where there is no limit."""
    quota, _, period = read_text(group / "cpu.max").strip().partition(" ")
    if not period:
        quota, period = (read_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return (int(quota), int(period)) if quota.isdecimal() and period.isdecimal() else (0, 0)
