"""The executor as a process of its own: its ports, its signals, its exit status and its last words."""

from __future__ import annotations

import asyncio
import json
import pathlib
import signal
import sys

import pytest

from executor_svc.devices.simulated import expected_tokens
from holdback.errors import FailedPreconditionError
from tests.executor.builders import VOCAB_SIZE, Steps
from tests.executor.serving import PROMPT, SERVING, free_port, health_of, start_command
from tests.executor.stub_scheduler import Drive, StubScheduler

pytestmark = pytest.mark.loopback

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_with_0_in_the_middle_of_a_stream(
    number: signal.Signals, scheduler: StubScheduler, steps: Steps, tmp_path: pathlib.Path
) -> None:
    child = await start_command(tmp_path, "--scheduler", scheduler.target, "--simulated-decode-us", "100000")
    registered = await scheduler.registrations.get()
    ports = json.loads((tmp_path / "ports.json").read_text())
    assert ports["port"] == registered.info.port
    assert await health_of(ports["health_port"], "readiness", SERVING) == SERVING
    async with Drive(registered.info) as drive:
        await drive.accepted()
        expected = expected_tokens(PROMPT, 3, VOCAB_SIZE)
        assert await drive.run(steps.new("r", PROMPT, padded=32)) == expected[:1]
        await drive.send(steps.decode("r"))
        await drive.send(steps.decode("r"))
        assert list((await drive.next()).output.sampled_token_ids) == expected[1:2]
        child.send_signal(number)
        rest = await drive.rest()
        assert [response.draining.reason for response in rest if response.HasField("draining")] != []
        # The last step was sent before the signal, but whether it was read before it is the system's to say.
        tokens = [list(response.output.sampled_token_ids) for response in rest if response.HasField("output")]
        assert tokens in ([], [expected[2:]])
        async with asyncio.timeout(60):
            _, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()
    assert b"Traceback" not in errors


async def test_a_signal_ends_a_process_that_never_found_a_scheduler(tmp_path: pathlib.Path) -> None:
    child = await start_command(tmp_path, "--scheduler", f"127.0.0.1:{free_port()}")
    assert child.stderr is not None
    async for line in child.stderr:
        if b"lease_ended" in line:
            break
    child.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        _, errors = await child.communicate()
    assert child.returncode == 0, errors.decode()


async def test_a_refusal_of_the_scheduler_is_the_last_line_of_a_process_that_fails(
    scheduler: StubScheduler, tmp_path: pathlib.Path
) -> None:
    scheduler.refusal = FailedPreconditionError("fingerprint is 'simulated'; allowed: 'b', the pool's")
    child = await start_command(tmp_path, "--scheduler", scheduler.target)
    _, errors = await child.communicate()
    assert child.returncode == 1
    assert errors.decode().splitlines()[-1] == "holdback executor: fingerprint is 'simulated'; allowed: 'b', the pool's"


@pytest.mark.case("B02")
async def test_memory_for_no_request_is_refused_before_anything_starts(tmp_path: pathlib.Path) -> None:
    child = await start_command(tmp_path, "--scheduler", "127.0.0.1:1", "--num-blocks", "4")
    _, errors = await child.communicate()
    assert child.returncode == 2
    last = errors.decode().splitlines()[-1]
    assert "max_model_len is 64, which needs 4 blocks of 16 tokens, but num_blocks is 4, of which 3 are usable" in last


async def test_a_step_that_hangs_ends_the_process_though_heartbeats_go_on(
    scheduler: StubScheduler, steps: Steps, tmp_path: pathlib.Path
) -> None:
    child = await start_command(
        tmp_path,
        *("--scheduler", scheduler.target, "--simulated-hang-token-id", "99"),
        *("--step-timeout-factor", "2", "--min-step-timeout-s", "2"),
    )
    registered = await scheduler.registrations.get()
    async with Drive(registered.info) as drive:
        await drive.accepted()
        await drive.send(steps.new("good", PROMPT, slot=0, blocks=[1], padded=32))
        await drive.send(steps.new("poison", [98, 99], slot=1, blocks=[2], padded=32))
        await drive.send(steps.decode("good"))
        assert list((await drive.next()).output.sampled_token_ids) == expected_tokens(PROMPT, 1, VOCAB_SIZE)
        async with asyncio.timeout(60):
            _, errors = await child.communicate()
    assert child.returncode == 3, errors.decode()
    lines = [json.loads(line) for line in errors.decode().splitlines()]
    (last,) = [line for line in lines if line["event"] == "step_timed_out"]
    assert (last["level"], last["step"], last["phase"], last["timeout_s"]) == ("critical", 1, "prefill", 2.0)
    assert 2 <= last["ran_s"] < 60
    assert any("collect" in call for call in last["stacks"]["collecting"])


async def test_a_graph_that_takes_longer_than_any_step_may_ends_the_start(
    scheduler: StubScheduler, tmp_path: pathlib.Path
) -> None:
    child = await start_command(
        tmp_path,
        *("--scheduler", scheduler.target, "--simulated-decode-us", "200000"),
        *("--min-step-timeout-s", "0.1", "--max-step-timeout-s", "0.1"),
    )
    async with asyncio.timeout(60):
        _, errors = await child.communicate()
    assert child.returncode == 2, errors.decode()
    assert "max_step_timeout_s is 0.1; allowed: at least what the slowest graph takes, decode" in errors.decode()


NATIVE_WARM_UP = """
import asyncio, sys, torch
from executor_svc import server
from executor_svc.config import ExecutorConfig
from executor_svc.devices.simulated import SimulatedDevice
from tests.executor.builders import build_device

class Computing(SimulatedDevice):
    # A device whose every step is seconds inside native code, as a large prefill of the cpu device is.
    def __init__(self):
        device = build_device()
        super().__init__(device.model, device.limits)

    def collect(self, ticket):
        print("computes", flush=True)
        torch.manual_seed(0)
        for _ in range(1000):
            torch.randn(1500, 1500) @ torch.randn(1500, 1500)
        return super().collect(ticket)

async def main():
    process = server.ExecutorProcess
    server.ExecutorProcess = lambda config: process(config, lambda config: Computing())
    return await server.serve(ExecutorConfig(scheduler="127.0.0.1:1", device="simulated"))

sys.exit(asyncio.run(main()))
"""


async def test_a_stop_in_the_middle_of_native_code_is_an_orderly_end() -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", NATIVE_WARM_UP),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert child.stdout is not None
    async with asyncio.timeout(60):
        async for line in child.stdout:
            if line == b"computes\n":
                break
    child.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        output, errors = await child.communicate()
    assert child.returncode == 0, (output, errors)
    assert b"terminate" not in errors
    assert b"left_a_computation_behind" in output + errors
