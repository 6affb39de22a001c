"""How many processors a process may use, by its affinity and its control group."""

from __future__ import annotations

import os
import pathlib

import pytest

from executor_svc import processors
from executor_svc.processors import count_processors, default_num_threads


@pytest.fixture
def machine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A file system with 64 processors and no control group."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    return tmp_path


def write(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_without_a_control_group_all_processors_of_the_affinity_count(machine: pathlib.Path):
    assert count_processors(machine) == 64


@pytest.mark.parametrize(
    ("quota", "count"), [("max 100000", 64), ("200000 100000", 2), ("250000 100000", 3), ("1000 100000", 1)]
)
def test_a_quota_counts_in_whole_processors(machine: pathlib.Path, quota: str, count: int):
    write(machine / "proc/self/cgroup", "0::/pod/container\n")
    write(machine / "sys/fs/cgroup/pod/container/cpu.max", f"{quota}\n")
    assert count_processors(machine) == count


def test_the_quota_of_a_group_around_counts_too(machine: pathlib.Path):
    write(machine / "proc/self/cgroup", "0::/pod/container\n")
    write(machine / "sys/fs/cgroup/pod/container/cpu.max", "max 100000\n")
    write(machine / "sys/fs/cgroup/pod/cpu.max", "400000 100000\n")
    assert count_processors(machine) == 4


def test_the_first_version_of_control_groups_has_its_own_files(machine: pathlib.Path):
    write(machine / "proc/self/cgroup", "4:memory:/pod\n3:cpu,cpuacct:/pod\n")
    group = machine / "sys/fs/cgroup/cpu,cpuacct/pod"
    write(group / "cpu.cfs_quota_us", "300000\n")
    write(group / "cpu.cfs_period_us", "100000\n")
    assert count_processors(machine) == 3
    write(group / "cpu.cfs_quota_us", "-1\n")
    assert count_processors(machine) == 64


def test_threads_are_the_processors_up_to_a_limit(monkeypatch: pytest.MonkeyPatch):
    for count, expected in ((2, 2), (16, 16), (64, 16)):
        monkeypatch.setattr(processors, "count_processors", lambda count=count: count)
        assert default_num_threads() == expected
