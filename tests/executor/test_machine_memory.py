"""Memory of the machine and of its control groups, read from files made here."""

from __future__ import annotations

import pathlib

import pytest

from executor_svc.kv_budget import DeviceMemory
from executor_svc.machine_memory import measure_machine_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    800 kB\n"


def write(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, content in ({"proc/meminfo": MEMINFO} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def test_what_is_not_available_is_in_use(tmp_path: pathlib.Path) -> None:
    assert measure_machine_memory(write(tmp_path, {})) == DeviceMemory(total=1000 * 1024, used=200 * 1024)


def test_a_group_that_allows_less_counts_and_its_caches_do_not(tmp_path: pathlib.Path) -> None:
    group = "sys/fs/cgroup/pods/one"
    files = {
        "proc/self/cgroup": "0::/pods/one\n",
        f"{group}/memory.max": "500000\n",
        f"{group}/memory.current": "300000\n",
        f"{group}/memory.stat": "anon 1\ninactive_file 100000\n",
    }
    assert measure_machine_memory(write(tmp_path, files)) == DeviceMemory(total=500000, used=200000)


def test_the_tightest_of_the_groups_around_a_process_counts(tmp_path: pathlib.Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pods/one\n",
        "sys/fs/cgroup/pods/one/memory.max": "max\n",
        "sys/fs/cgroup/pods/memory.max": "400000\n",
        "sys/fs/cgroup/pods/memory.current": "390000\n",
    }
    assert measure_machine_memory(write(tmp_path, files)) == DeviceMemory(total=400000, used=390000)


def test_a_container_that_is_told_the_path_of_its_machine_finds_its_own_group(tmp_path: pathlib.Path) -> None:
    files = {
        "proc/self/cgroup": "0::/kubepods/of/the/machine\n",
        "sys/fs/cgroup/memory.max": "500000\n",
        "sys/fs/cgroup/memory.current": "100000\n",
    }
    assert measure_machine_memory(write(tmp_path, files)) == DeviceMemory(total=500000, used=100000)


@pytest.mark.parametrize(("limit", "total"), [("600000", 600000), ("9223372036854771712", 1000 * 1024)])
def test_groups_of_the_first_version_count_too(limit: str, total: int, tmp_path: pathlib.Path) -> None:
    group = "sys/fs/cgroup/memory/job"
    files = {
        "proc/self/cgroup": "5:cpu:/job\n4:memory:/job\n0::/\n",
        f"{group}/memory.limit_in_bytes": limit,
        f"{group}/memory.usage_in_bytes": "300000",
        f"{group}/memory.stat": "cache 7\ntotal_inactive_file 200000\n",
    }
    used = 100000 if total == 600000 else 200 * 1024
    assert measure_machine_memory(write(tmp_path, files)) == DeviceMemory(total=total, used=used)


def test_a_machine_that_says_nothing_still_has_a_size(tmp_path: pathlib.Path) -> None:
    found = measure_machine_memory(tmp_path)
    assert 0 < found.used < found.total


def test_this_machine_has_memory() -> None:
    found = measure_machine_memory()
    assert 0 < found.used < found.total
