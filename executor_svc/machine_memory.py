"""Memory of this machine, or of the control group that this process runs in where that allows less."""

from __future__ import annotations

import os
import pathlib
import resource
import sys

from executor_svc.control_groups import find_control_groups, read_text
from executor_svc.kv_budget import DeviceMemory

_ROOT = pathlib.Path("/")
_UNLIMITED = 1 << 60  # the first version of control groups says "no limit" by a huge number


def measure_machine_memory(root: pathlib.Path = _ROOT) -> DeviceMemory:
    """What there is and what is in use, file caches not counted: the system gives them up when it needs to.

    Args:
        root: of the file system, another one in tests.
    """
    total, available = _machine(root)
    for limit, used in _control_groups(root):
        total, available = min(total, limit), min(available, max(0, limit - used))
    return DeviceMemory(total=total, used=total - available)


def _machine(root: pathlib.Path) -> tuple[int, int]:
    """Total and available bytes."""
    found = _read_table(root / "proc/meminfo")
    if "MemTotal:" in found and "MemAvailable:" in found:
        return found["MemTotal:"] * 1024, found["MemAvailable:"] * 1024
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    unit = 1 if sys.platform == "darwin" else 1024
    return total, max(0, total - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _control_groups(root: pathlib.Path) -> list[tuple[int, int]]:
    """Limit and use, in bytes, of this process's group and of each group around it that has a limit."""
    groups = find_control_groups("memory", root)
    return [(limit, _read_use(group)) for group in groups if (limit := _read_limit(group))]


def _read_limit(group: pathlib.Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = read_text(group / name).strip()
        if text.isdecimal() and 0 < int(text) < _UNLIMITED:
            return int(text)
    return None


def _read_use(group: pathlib.Path) -> int:
    for name in ("memory.current", "memory.usage_in_bytes"):
        text = read_text(group / name).strip()
        if text.isdecimal():
            table = _read_table(group / "memory.stat")
            return max(0, int(text) - table.get("total_inactive_file", table.get("inactive_file", 0)))
    return 0


def _read_table(path: pathlib.Path) -> dict[str, int]:
    """Lines of a name and a number."""
    words = (line.split() for line in read_text(path).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) >= 2 and line[1].isdecimal()}
