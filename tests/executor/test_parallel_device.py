"""A device of two ranks as a runner sees it, the second one a process of its own: a tiny model in float32.

The builders of steps take a `CpuDevice`, of which they look at nothing that other devices lack.
"""

from __future__ import annotations

import os
import pathlib
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from executor_svc.config import ExecutorConfig
from executor_svc.devices import create_device
from executor_svc.devices.cpu import CpuDevice
from executor_svc.devices.parallel import ParallelDevice
from executor_svc.parallel import processes
from holdback.errors import ConfigError, InternalError, InvalidArgumentError
from holdback.types import RequestSpec, SamplingParams
from tests.executor.builders import run_overlapping
from tests.executor.tiny_models import ALL_LOGPROBS, VOCAB_SIZE, decode_step, prefill_step, save_model

pytestmark = pytest.mark.loopback

PROMPT = [20, 61, 22, 93, 24, 25, 116, 27, 28, 79, 30]
GREEDY = SamplingParams(temperature=0.0)


def build_config(directory: pathlib.Path, **changes: Any) -> ExecutorConfig:
    settings: dict[str, Any] = {
        "scheduler": "127.0.0.1:1",
        "model": directory,
        "dtype": "float32",
        "block_size": 4,
        "num_blocks": 32,
    }
    buckets = {"num_batched_tokens_buckets": (8, 16), "num_seqs_buckets": (1, 2, 4), "num_threads": 2}
    return ExecutorConfig(**(settings | buckets | changes))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def whole(tiny_model: pathlib.Path) -> Iterator[CpuDevice]:
    device = create_device(build_config(tiny_model))
    assert isinstance(device, CpuDevice)
    yield device
    device.close()


@pytest.fixture(scope="module")
def shared_device(tiny_model: pathlib.Path) -> Iterator[ParallelDevice]:
    num_threads = torch.get_num_threads()
    device = create_device(build_config(tiny_model, tensor_parallel_size=2))
    assert isinstance(device, ParallelDevice)
    yield device
    device.close()
    torch.set_num_threads(num_threads)


@pytest.fixture
def device(shared_device: ParallelDevice) -> ParallelDevice:
    shared_device.reset()
    return shared_device


def local(device: ParallelDevice) -> CpuDevice:
    assert isinstance(device._local, CpuDevice)
    return device._local


def test_requests_that_come_and_go_get_the_tokens_of_the_whole_model(device: Any, whole: CpuDevice) -> None:
    """Through the runner: chunks, a batch, a prefix hit, slots and blocks that are used again, drawn tokens."""
    assert run_overlapping(device, PROMPT, 8, 16) == run_overlapping(whole, PROMPT, 8, 16)


def test_two_steps_are_in_flight_and_the_second_reads_the_token_of_the_first(device: Any, whole: CpuDevice) -> None:
    def run(device: Any) -> list[list[int]]:
        device.reset()
        device.start_request(0, RequestSpec("r", PROMPT, GREEDY))
        table = [5, 9, 2, 30]
        steps = [prefill_step(device, PROMPT, table, params=GREEDY)]
        steps += [decode_step(device, [len(PROMPT) + number], [table], [0], [GREEDY]) for number in range(3)]
        tickets = [device.launch(step) for step in steps[:2]]
        found = []
        for step in [*steps[2:], None, None]:
            found.append(device.collect(tickets.pop(0)).token_ids.tolist())
            if step is not None:
                tickets.append(device.launch(step))
        return found

    assert run(device) == run(whole)


def test_a_rank_has_half_the_heads_and_writes_to_the_slots_of_the_step_alone(device: Any) -> None:
    cache = local(device).kv_cache
    for pages in [*cache.keys, *cache.values]:
        assert pages.shape[2] == 1
        pages.fill_(7.0)
    device.collect(device.launch(prefill_step(device, PROMPT[:6], [5, 9], params=GREEDY)))
    device.collect(device.launch(decode_step(device, [6], [[5, 9]], [0], [GREEDY], size=2)))
    written = [5 * 4 + offset for offset in range(4)] + [9 * 4 + offset for offset in range(3)]
    for pages in [*cache.keys, *cache.values]:
        is_kept = (pages.flatten(0, 1) == 7.0).flatten(1).all(dim=1)
        assert (~is_kept).nonzero().flatten().tolist() == written


def test_limits_and_model_are_those_of_the_whole(device: Any, whole: CpuDevice) -> None:
    assert (device.kind, device.model, device.limits) == (whole.kind, whole.model, whole.limits)
    assert device.declared_graphs() == whole.declared_graphs()
    assert "2 ranks share each layer" in device.kernels


def test_a_request_that_is_refused_leaves_the_ranks_in_step(device: Any, whole: CpuDevice) -> None:
    bad = SamplingParams(temperature=0.0, stop_token_ids=(VOCAB_SIZE,))
    device.start_request(0, RequestSpec("bad", PROMPT, bad))
    ticket = device.launch(prefill_step(device, PROMPT, [5, 9, 2], params=bad))
    with pytest.raises(InvalidArgumentError, match=f"stop_token_ids is {VOCAB_SIZE}"):
        device.collect(ticket)
    for each in (device, whole):
        each.reset()
        each.start_request(0, RequestSpec("good", PROMPT, ALL_LOGPROBS))
    ours, theirs = (each.collect(each.launch(prefill_step(each, PROMPT, [5, 9, 2]))) for each in (device, whole))
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()


def test_a_shape_that_is_not_declared_is_refused_and_no_rank_hears_of_it(device: Any) -> None:
    step = prefill_step(device, PROMPT, [5, 9, 2], params=GREEDY)
    step.positions = step.positions[:-1]
    with pytest.raises(ValueError, match="positions of a prefill of 16 has shape"):
        device.launch(step)
    result = device.collect(device.launch(prefill_step(device, PROMPT, [5, 9, 2], params=GREEDY)))
    assert len(result.token_ids) == 1


def test_numbers_that_are_not_finite_fail_their_row_alone(device: Any) -> None:
    cache = local(device).kv_cache
    device.collect(device.launch(prefill_step(device, PROMPT, [5, 9, 2], params=GREEDY)))
    device.collect(device.launch(prefill_step(device, PROMPT, [6, 10, 3], slot=1, params=GREEDY)))
    expected = device.collect(
        device.launch(decode_step(device, [11, 11], [[5, 9, 2], [6, 10, 3]], [0, 1], [GREEDY] * 2))
    )
    cache.keys[0][10].fill_(float("nan"))
    found = device.collect(device.launch(decode_step(device, [11, 11], [[5, 9, 2], [6, 10, 3]], [0, 1], [GREEDY] * 2)))
    assert expected.failed_rows == []
    assert found.failed_rows == [1]
    assert found.token_ids[1] == 0
    assert np.isfinite(found.token_ids).all()


def test_a_model_that_ranks_cannot_share_is_refused_by_the_command(tmp_path: pathlib.Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
    directory = save_model(tmp_path / "model", transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    command = [
        sys.executable,
        "-m",
        "holdback.cli",
        "executor",
        "--scheduler",
        "127.0.0.1:1",
        "--model",
        str(directory),
    ]
    done = subprocess.run(
        [*command, "--dtype", "float32", "--tensor-parallel-size", "2"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "holdback executor: tensor_parallel_size is 2, but transformers has no plan to cut a gpt2; allowed: 1"
    )


def test_a_rank_that_cannot_load_is_an_error_with_its_words(
    tiny_model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import socket, sys; from executor_svc.parallel.messages import Frame, FrameSocket\n"
        "connection = FrameSocket(socket.socket(fileno=int(sys.argv[1])))\n"
        "connection.send(Frame('failed', {'reason': 'torch is broken here'})); sys.exit(1)\n"
    )
    monkeypatch.setattr(
        processes, "_command", lambda number, size, descriptor: (sys.executable, "-c", program, str(descriptor))
    )
    with pytest.raises(ConfigError, match=r"rank 1 \(process \d+\) ended with status 1: torch is broken here"):
        create_device(build_config(tiny_model, tensor_parallel_size=2))


def test_a_rank_that_is_killed_in_a_step_ends_the_process_with_3(shared_device: Any) -> None:
    """Last, for the device is of no use any more."""
    statuses: queue.Queue[int] = queue.Queue()
    ranks = shared_device._ranks
    ranks._end_process = statuses.put
    pid = ranks._ranks[0].process.pid
    os.kill(pid, signal.SIGSTOP)
    ticket = shared_device.launch(prefill_step(shared_device, PROMPT, [5, 9, 2], params=GREEDY))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InternalError, match="a step failed among ranks"):
        shared_device.collect(ticket)
    assert statuses.get(timeout=60) == 3
