"""An executor of two ranks as real processes, driven over gRPC: how it stops, and what a lost rank does to it."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

import pytest

from holdback.types import SamplingParams
from tests.executor.builders import Steps
from tests.executor.stub_scheduler import Drive, Registered, StubScheduler
from tests.executor.tiny_models import save_model

pytestmark = pytest.mark.loopback

PROMPT = [20, 61, 22, 93, 24]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


class Executor:
    """One executor process with two ranks.

    Attributes:
        child: rank 0.
        registered: its registration.
        rank_pid: of rank 1.
    """

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.child = child
        self.lines: list[dict[str, Any]] = []
        self.rank_pid = 0
        self.registered: Registered

    @classmethod
    async def start(cls, scheduler: StubScheduler, model: pathlib.Path, *arguments: str) -> Executor:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "holdback.cli", "executor", "--scheduler", scheduler.target),
            *("--model", str(model), "--dtype", "float32", "--tensor-parallel-size", "2", "--num-threads", "2"),
            *(
                "--block-size",
                "4",
                "--num-blocks",
                "32",
                "--num-batched-tokens-buckets",
                "8",
                "--num-seqs-buckets",
                "2",
            ),
            *arguments,
            stderr=asyncio.subprocess.PIPE,
        )
        executor = cls(child)
        await executor._read_until("registered")
        executor.registered = await scheduler.registrations.get()
        (started,) = [line for line in executor.lines if line["event"] == "ranks_started"]
        executor.rank_pid = started["pids"]["1"]
        return executor

    async def _read_until(self, event: str) -> None:
        assert self.child.stderr is not None
        async for line in self.child.stderr:
            self.lines.append(json.loads(line))
            if self.lines[-1]["event"] == event:
                return
        raise AssertionError(f"no {event}: {self.lines}")

    async def end(self) -> list[dict[str, Any]]:
        """Waits for the end of both ranks, who share standard error. Returns the lines since the start."""
        async with asyncio.timeout(60):
            _, errors = await self.child.communicate()
        return [json.loads(line) for line in errors.decode().splitlines()]

    def kill(self) -> None:
        for pid in (self.child.pid, self.rank_pid):
            if pid and is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_rank_that_is_killed_between_steps_ends_the_executor_within_seconds(
    scheduler: StubScheduler, steps: Steps, tiny_model: pathlib.Path
) -> None:
    executor = await Executor.start(scheduler, tiny_model)
    try:
        async with Drive(executor.registered.info) as drive:
            await drive.accepted()
            first = await drive.run(steps.new("r", PROMPT, blocks=[1, 2, 3], padded=8, sampling=GREEDY))
            assert len(first) == 1
            assert len(await drive.run(steps.decode("r"))) == 1
            started = time.monotonic()
            os.kill(executor.rank_pid, signal.SIGKILL)
            lines = await executor.end()
        assert time.monotonic() - started < 20
        assert executor.child.returncode == 3
        (lost,) = [line for line in lines if line["event"] == "rank_lost"]
        assert (lost["level"], lost["rank"], lost["exit_status"]) == ("critical", 1, 3)
        assert lost["reason"] == f"rank 1 (process {executor.rank_pid}) was ended by SIGKILL"
    finally:
        executor.kill()


async def test_a_rank_that_is_stopped_in_a_step_is_named_when_the_watchdog_ends_the_executor(
    scheduler: StubScheduler, steps: Steps, tiny_model: pathlib.Path
) -> None:
    executor = await Executor.start(scheduler, tiny_model, "--min-step-timeout-s", "3")
    try:
        async with Drive(executor.registered.info) as drive:
            await drive.accepted()
            os.kill(executor.rank_pid, signal.SIGSTOP)
            await drive.send(steps.new("r", PROMPT, blocks=[1, 2, 3], padded=8, sampling=GREEDY))
            lines = await executor.end()
        assert executor.child.returncode == 3
        (late,) = [line for line in lines if line["event"] == "step_timed_out"]
        assert late["waits_for"] == f"rank 1 (process {executor.rank_pid}) is stopped"
    finally:
        executor.kill()


async def test_a_signal_stops_all_ranks_after_the_steps_that_were_sent(
    scheduler: StubScheduler, steps: Steps, tiny_model: pathlib.Path
) -> None:
    executor = await Executor.start(scheduler, tiny_model)
    try:
        # What a service manager does that sends its signal to every process of a service.
        os.kill(executor.rank_pid, signal.SIGTERM)
        async with Drive(executor.registered.info) as drive:
            await drive.accepted()
            assert len(await drive.run(steps.new("r", PROMPT, blocks=[1, 2, 3], padded=8, sampling=GREEDY))) == 1
            executor.child.send_signal(signal.SIGTERM)
            rest = await drive.rest()
            assert [response.draining.reason for response in rest if response.HasField("draining")] != []
            lines = await executor.end()
        assert executor.child.returncode == 0
        assert [line["event"] for line in lines if line["level"] in ("warning", "error", "critical")] == []
        assert not is_alive(executor.rank_pid)
    finally:
        executor.kill()


async def test_ranks_end_with_the_executor_however_it_ends(scheduler: StubScheduler, tiny_model: pathlib.Path) -> None:
    executor = await Executor.start(scheduler, tiny_model)
    try:
        os.kill(executor.child.pid, signal.SIGKILL)
        await executor.end()
        assert executor.child.returncode == -signal.SIGKILL
    finally:
        executor.kill()
