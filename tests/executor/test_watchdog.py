"""The watchdog: what it lets pass, and what it ends the process for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.devices.base import Device, GraphKey
from executor_svc.devices.simulated import SimulatedFaults, SimulatedLatencies
from executor_svc.runner import LaunchedStep, NeuronModelRunner
from executor_svc.watchdog import EXIT_STEP_TIMEOUT, StepWatchdog
from holdback.types import GraphLatency, Phase
from tests.executor.builders import Steps, build_device, build_runner

PROMPT = [20, 21, 22]


class Clock:
    """Nanoseconds that pass when the test says so."""

    now_ns = 0

    def pass_s(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def __call__(self) -> int:
        return self.now_ns


def build_watchdog(
    runner: NeuronModelRunner,
    *latencies: GraphLatency,
    factor: float = 20.0,
    least_s: float = 10.0,
    most_s: float = 600.0,
):
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    timeouts = {"step_timeout_factor": factor, "min_step_timeout_s": least_s, "max_step_timeout_s": most_s}
    config = ExecutorConfig.model_validate({"scheduler": "127.0.0.1:1", "device": "simulated"} | timeouts)
    watchdog = StepWatchdog(runner, latencies, timeout_s=config.step_timeout_s, end_process=ended.put)
    return watchdog, ended


@contextmanager
def watched(device: Device, least_s: float) -> Iterator[tuple[NeuronModelRunner, queue.SimpleQueue[int]]]:
    runner = NeuronModelRunner(device)
    watchdog, ended = build_watchdog(runner, least_s=least_s)
    watchdog.start()
    try:
        yield runner, ended
    finally:
        watchdog.stop()
        device.close()


@pytest.mark.parametrize(
    ("key", "expected_s"),
    [
        (GraphKey(Phase.DECODE, 4, 32), 10.0),  # 20 times 0.1 s is less
        (GraphKey(Phase.PREFILL, 8, 32), 40.0),  # 20 times the longer of 1 and 2 s
        (GraphKey(Phase.DECODE, 2, 32), 10.0),  # nothing is known of it
        (None, 10.0),  # nothing to run
    ],
)
def test_a_step_may_take_20_times_its_longest_time_and_10_s_at_least(key: GraphKey | None, expected_s: float) -> None:
    latencies = [
        GraphLatency(Phase.DECODE, 4, 32, 100_000),
        GraphLatency(Phase.PREFILL, 8, 0, 1_000_000),
        GraphLatency(Phase.PREFILL, 8, 32, 2_000_000),
    ]
    watchdog, _ = build_watchdog(build_runner(), *latencies)
    assert watchdog.timeout_s(LaunchedStep(0, 0, 0, key)) == expected_s


def test_no_step_may_take_longer_than_the_longest_timeout() -> None:
    watchdog, _ = build_watchdog(build_runner(), GraphLatency(Phase.DECODE, 4, 32, 40_000_000))
    assert watchdog.timeout_s(LaunchedStep(0, 0, 0, GraphKey(Phase.DECODE, 4, 32))) == 600


def test_the_time_of_a_step_counts_from_the_end_of_the_one_before() -> None:
    clock, steps = Clock(), Steps()
    runner = NeuronModelRunner(build_device(), clock_ns=clock)
    assert runner.oldest() is None
    first = runner.launch(steps.new("r", PROMPT, blocks=[1, 2]))
    clock.pass_s(3)
    second = runner.launch(steps.decode("r"))
    clock.pass_s(4)
    assert runner.oldest() == (first, 7.0)
    runner.collect(first)
    assert runner.oldest() == (second, 0.0)
    clock.pass_s(2)
    assert runner.oldest() == (second, 2.0)
    runner.collect(second)
    assert runner.oldest() is None


def test_a_step_that_is_overdue_is_seen_and_one_that_is_not_is_waited_for() -> None:
    clock, steps = Clock(), Steps()
    runner = NeuronModelRunner(build_device(), clock_ns=clock)
    watchdog, _ = build_watchdog(runner, GraphLatency(Phase.PREFILL, 4, 32, 1_000_000))
    assert (watchdog._pause_s(), watchdog._overdue()) == (10.0, None)
    step = runner.launch(steps.new("r", PROMPT))
    clock.pass_s(15)
    assert (watchdog._pause_s(), watchdog._overdue()) == (5.0, None)
    clock.pass_s(5)
    assert (watchdog._pause_s(), watchdog._overdue()) == (0.0, (step, 20.0))


def test_a_launch_that_never_returns_is_seen_too(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    device, entered = build_device(), threading.Event()

    def hang(_inputs: object) -> object:
        entered.set()
        device._closed.wait()
        return None

    monkeypatch.setattr(device, "launch", hang)
    with watched(device, least_s=0.05) as (runner, ended):
        thread = threading.Thread(target=runner.launch, args=(steps.new("r", PROMPT),), daemon=True)
        thread.start()
        assert entered.wait(60)
        assert ended.get(timeout=60) == EXIT_STEP_TIMEOUT
    thread.join(60)


def test_a_step_that_hangs_ends_the_process_with_its_own_status(
    steps: Steps, capfd: pytest.CaptureFixture[str]
) -> None:
    device = build_device(faults=SimulatedFaults(hang_token_id=21))
    with watched(device, least_s=0.05) as (runner, ended):
        thread = threading.Thread(target=runner.execute, args=(steps.new("r", PROMPT),), name="waits", daemon=True)
        thread.start()
        assert ended.get(timeout=60) == 3
    thread.join(60)
    line = next(line for line in capfd.readouterr().out.splitlines() if "step_timed_out" in line)
    for part in ("step=0", "phase=prefill", "size=4", "timeout_s=0.05", "exit_status=3", "waits"):
        assert part in line


def test_steps_that_end_in_time_are_let_pass_however_many_there_are(steps: Steps) -> None:
    device = build_device(latencies=SimulatedLatencies(prefill_us_per_token=0.0, decode_us=50_000))
    with watched(device, least_s=1) as (runner, ended):
        runner.execute(steps.new("r", [20], blocks=[1, 2, 3, 4, 5, 6, 7, 8]))
        launched = runner.launch(steps.decode("r"))
        for _ in range(29):  # 1.45 s of device time, never idle, 0.1 s from launch to end
            behind = runner.launch(steps.decode("r"))
            runner.collect(launched)
            launched = behind
        runner.collect(launched)
        assert ended.empty()


def test_a_process_that_was_stopped_gets_time_to_collect_what_is_done(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP and SIGCONT: the watchdog may wake before the thread that would collect a step that ended long ago."""
    clock = Clock()
    runner = NeuronModelRunner(build_device(), clock_ns=clock)
    watchdog, _ = build_watchdog(runner)
    launched = runner.launch(steps.new("r", PROMPT))
    waits: list[float] = []

    def wait(timeout: float) -> bool:
        waits.append(timeout)
        if len(waits) == 1:
            clock.pass_s(100)  # everything stood still
        else:
            runner.collect(launched)
        return False

    monkeypatch.setattr(watchdog._stopped, "wait", wait)
    monkeypatch.setattr("executor_svc.watchdog.time.monotonic", lambda: clock.now_ns / 1e9)
    assert not watchdog._wait()
    assert waits == [10.0, 1.0]
    assert watchdog._overdue() is None
