"""Ranks as rank 0 watches them, with small programs in their place: what is told, and what an end comes to."""

from __future__ import annotations

import os
import pathlib
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.parallel import processes
from executor_svc.parallel.messages import Frame
from executor_svc.parallel.processes import RankProcesses
from holdback.errors import ConfigError, InternalError

pytestmark = pytest.mark.loopback

PROGRAM = """
import os, signal, socket, sys
from executor_svc.parallel.messages import Frame, FrameSocket
rank, connection = int(sys.argv[1]), FrameSocket(socket.socket(fileno=int(sys.argv[2])))
"""
READY = 'connection.send(Frame("joining")); connection.send(Frame("ready"))\n'
FOLLOW = "while connection.receive() is not None: pass\n"

Start = Callable[..., RankProcesses]


@pytest.fixture
def statuses() -> queue.Queue[int]:
    """What the process was to end with."""
    return queue.Queue()


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, statuses: queue.Queue[int]) -> Iterator[Start]:
    """Starts ranks that run the given lines."""
    started: list[RankProcesses] = []

    def start_ranks(program: str, size: int = 2) -> RankProcesses:
        monkeypatch.setattr(
            processes,
            "_command",
            lambda number, size, descriptor: (sys.executable, "-c", PROGRAM + program, str(number), str(descriptor)),
        )
        settings: dict[str, Any] = {"scheduler": "127.0.0.1:1", "model": "m", "tensor_parallel_size": size}
        config = ExecutorConfig(**settings)
        started.append(RankProcesses(config, end_process=statuses.put))
        return started[-1]

    yield start_ranks
    for ranks in started:
        ranks.close()


def pid_of(ranks: RankProcesses, number: int) -> int:
    return ranks._ranks[number - 1].process.pid


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_are_told_the_configuration_first_and_then_everything_in_order(
    start: Start, tmp_path: pathlib.Path
) -> None:
    said = tmp_path / "said"
    ranks = start(
        READY + f"out = open({str(said)!r} + str(rank), 'w')\n"
        "while (frame := connection.receive()) is not None:\n"
        "    number = frame.fields['config']['tensor_parallel_size'] if frame.kind == 'config' else frame.fields['n']\n"
        "    print(frame.kind, number, file=out)\n",
        size=3,
    )
    ranks.wait_for("ready")
    for number in range(3):
        ranks.send(Frame("step", {"n": number}))
    ranks.close()
    for rank in (1, 2):
        assert pathlib.Path(f"{said}{rank}").read_text() == "config 3\nstep 0\nstep 1\nstep 2\n"


def test_a_rank_that_ends_while_it_loads_is_an_error_with_its_last_words(start: Start) -> None:
    ranks = start(
        'connection.send(Frame("joining"))\n'
        'connection.send(Frame("failed", {"reason": "no such model"}))\n'
        "sys.exit(2)\n"
    )
    with pytest.raises(ConfigError) as caught:
        ranks.wait_for("ready")
    assert str(caught.value) == f"rank 1 (process {pid_of(ranks, 1)}) ended with status 2: no such model"


def test_a_rank_that_is_killed_while_it_loads_is_named_with_the_signal(start: Start) -> None:
    ranks = start(
        'if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\nconnection.send(Frame("joining"))\n' + FOLLOW, size=3
    )
    with pytest.raises(ConfigError) as caught:
        ranks.wait_for("ready")
    assert str(caught.value) == f"rank 2 (process {pid_of(ranks, 2)}) was ended by SIGKILL"


def test_a_rank_that_ends_under_a_load_that_does_not_notice_ends_the_process(
    start: Start, statuses: queue.Queue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LOAD_GRACE_S", 0.05)
    start('connection.send(Frame("joining"))\n').wait_for("joining")
    assert statuses.get(timeout=60) == 2


def test_a_rank_that_ends_while_it_serves_ends_the_process_with_3(start: Start, statuses: queue.Queue[int]) -> None:
    ranks = start(READY + FOLLOW, size=3)
    ranks.wait_for("ready")
    ranks.serve()
    os.kill(pid_of(ranks, 2), signal.SIGKILL)
    assert statuses.get(timeout=60) == 3
    ranks.send(Frame("reset"))  # to whom is left; it does not raise


def test_a_step_that_fails_because_a_rank_is_gone_is_told_as_that_once(
    start: Start, statuses: queue.Queue[int]
) -> None:
    ranks = start(READY + "connection.receive(); connection.receive(); sys.exit(7)\n")
    ranks.wait_for("ready")
    ranks.serve()
    ranks.send(Frame("step"))
    with pytest.raises(InternalError):
        ranks.fail(RuntimeError("connection closed by peer"))
    assert statuses.get(timeout=60) == 3
    ranks.close()
    assert statuses.empty()


def test_a_step_that_fails_on_rank_0_alone_ends_the_process_with_3(
    start: Start, statuses: queue.Queue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FAIL_GRACE_S", 0.05)
    ranks = start(READY + FOLLOW)
    ranks.wait_for("ready")
    ranks.serve()
    with pytest.raises(InternalError, match="out of memory"):
        ranks.fail(RuntimeError("out of memory"))
    assert statuses.get(timeout=60) == 3


def test_a_close_ends_ranks_in_order_and_says_nothing(start: Start, statuses: queue.Queue[int]) -> None:
    ranks = start(READY + FOLLOW, size=3)
    ranks.wait_for("ready")
    ranks.serve()
    pids = [pid_of(ranks, number) for number in (1, 2)]
    folder = ranks.meeting_file.parent
    assert folder.stat().st_mode & 0o077 == 0
    ranks.close()
    assert [is_alive(pid) for pid in pids] == [False, False]
    assert not folder.exists()
    assert statuses.empty()


def test_a_rank_that_does_not_end_when_asked_is_killed(
    start: Start, statuses: queue.Queue[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CLOSE_TIMEOUT_S", 0.2)
    ranks = start(READY + "signal.pause()\n")
    ranks.wait_for("ready")
    ranks.serve()
    ranks.close()
    assert not is_alive(pid_of(ranks, 1))
    assert statuses.empty()


def test_the_command_of_a_rank_names_the_rank_and_nothing_of_the_configuration() -> None:
    command = processes._command(1, 2, 5)
    assert command[1:] == ("-P", "-m", "executor_svc.parallel.rank", "--rank", "1", "--size", "2", "--socket", "5")


def test_a_rank_takes_no_module_from_the_working_directory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "structlog.py").write_text("raise SystemExit('not this one')")
    command = [*processes._command(1, 2, 5), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "--rank" in done.stdout) == (0, True), done.stderr
