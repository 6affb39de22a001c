"""The compiled step on a tiny model: what is traced, how often, and what it computes beside the `cpu` device.

No model of another family may be loaded here: transformers notes each in a table of its own, which a graph was traced
with, and a graph that is warm then refuses to run. A process that serves loads one model.
"""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from executor_svc.devices.base import GraphKey, StepInputs, StepResult
from executor_svc.devices.compiled import CompiledDevice
from executor_svc.devices.cpu import CpuDevice
from executor_svc.graphs import warm_up
from executor_svc.runner import NeuronModelRunner
from holdback.errors import ConfigError
from holdback.types import Phase, RequestSpec, SamplingParams, TokenLogprobs
from tests.executor.builders import Steps
from tests.executor.compiled_models import CoreAtenBackend, CountingBackend, build_compiled, check_graph
from tests.executor.tiny_models import VOCAB_SIZE, build_device, decode_step, prefill_step, save_model, with_graph

pytestmark = [pytest.mark.compiled, pytest.mark.usefixtures("one_thread")]

GREEDY = SamplingParams(temperature=0.0)
BUCKETS: dict[str, Any] = {"prefill_buckets": (8,), "seqs_buckets": (4,), "context_buckets": (16, 64)}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def backend() -> CountingBackend:
    return CountingBackend()


@pytest.fixture(scope="module")
def warm_device(tiny_model: pathlib.Path, backend: CountingBackend) -> Iterator[CompiledDevice]:
    device = build_compiled(tiny_model, backend, **BUCKETS)
    warm_up(device)
    yield device
    device.close()


@pytest.fixture
def device(warm_device: CompiledDevice) -> CompiledDevice:
    warm_device.reset()
    return warm_device


@pytest.fixture(scope="module")
def shared_cpu(tiny_model: pathlib.Path) -> Iterator[CpuDevice]:
    device = build_device(tiny_model, num_batched_tokens_buckets=(8,), num_seqs_buckets=(4,))
    yield device
    device.close()


@pytest.fixture
def cpu(shared_cpu: CpuDevice) -> CpuDevice:
    shared_cpu.reset()
    return shared_cpu


def tokens(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCAB_SIZE, length)]


def run_both(device: CompiledDevice, cpu: CpuDevice, inputs: StepInputs) -> tuple[StepResult, StepResult]:
    found = device.collect(device.launch(with_graph(device, inputs)))
    return found, cpu.collect(cpu.launch(inputs))


def assert_equal(found: StepResult, expected: StepResult) -> None:
    """Tokens and, over the whole vocabulary, log-probabilities."""
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.failed_rows == expected.failed_rows
    assert len(found.logprobs) == len(expected.logprobs)
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(by_token(ours), by_token(theirs), atol=1e-4, rtol=0)


def by_token(logprobs: TokenLogprobs) -> torch.Tensor:
    values = torch.empty(VOCAB_SIZE)
    values[list(logprobs.top_token_ids)] = torch.tensor(logprobs.top_logprobs)
    return values


def test_each_declared_graph_is_traced_once_and_nothing_after_warm_up(
    device: CompiledDevice, backend: CountingBackend
) -> None:
    assert [dataclasses.astuple(key) for key in device.declared_graphs()] == [
        (Phase.PREFILL, 8, 0),
        (Phase.PREFILL, 8, 16),
        (Phase.PREFILL, 8, 64),
        (Phase.DECODE, 4, 16),
        (Phase.DECODE, 4, 64),
    ]
    assert len(backend.graphs) == 5
    for inputs in (
        prefill_step(device, tokens(3), [5], params=None),
        prefill_step(device, tokens(5), [5, 6], start=3),
        decode_step(device, [8], [[5, 6, 7]], [0]),
        decode_step(device, [8, 20], [[5, 6, 7], list(range(8, 14))], [0, 1]),
    ):
        device.collect(device.launch(with_graph(device, inputs)))
    assert len(backend.graphs) == 5


def test_a_compilation_after_warm_up_is_an_error_of_the_step(
    device: CompiledDevice, backend: CountingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of another dtype stands for whatever may make a compiler look again."""
    tables = device._state.tables
    other = device._state._replace(tables=tables._replace(bias=tables.bias.double()))
    monkeypatch.setattr(device, "_state", other)
    step = with_graph(device, prefill_step(device, tokens(3), [5]))
    with pytest.raises(RuntimeError, match="fail_on_recompile"):
        device.collect(device.launch(step))
    assert len(backend.graphs) == 5


@pytest.mark.parametrize("cuts", [[8], [4, 8, 12], [1, 2, 10, 18], [8, 16, 24, 32]])
def test_a_prompt_in_chunks_gives_the_tokens_of_the_cpu_device(
    device: CompiledDevice, cpu: CpuDevice, cuts: list[int]
) -> None:
    prompt, table = tokens(cuts[-1] + 3), [5, 9, 2, 30, 11, 12, 1, 20, 21]
    for start, end in zip([0, *cuts], cuts, strict=False):
        unfinished, _ = run_both(device, cpu, prefill_step(device, prompt[start:end], table, start=start, params=None))
        assert unfinished.token_ids.tolist() == []
    assert_equal(*run_both(device, cpu, prefill_step(device, prompt[cuts[-1] :], table, start=cuts[-1])))


@pytest.mark.case("B22")
def test_a_prefix_hit_gives_the_tokens_of_the_cpu_device(device: CompiledDevice, cpu: CpuDevice) -> None:
    first = tokens(8)
    run_both(device, cpu, prefill_step(device, first, [5, 9]))
    second = [*first[:4], *tokens(7, seed=1)]
    assert_equal(*run_both(device, cpu, prefill_step(device, second[4:], [5, 20, 21], start=4, slot=1)))


def test_a_batch_decodes_the_tokens_of_the_cpu_device_from_its_own_last_tokens(
    device: CompiledDevice, cpu: CpuDevice
) -> None:
    """Context buckets 16 and 64 are crossed on the way; rows of other lengths and a padding row are in the batch."""
    tables = [[5, 9, 2, 30, 11], [12, 13, 14, 15, 16], [17, 18, 19]]
    lengths = [14, 7, 3]
    for slot, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        prompt = tokens(length, seed=slot)
        for start in range(0, length, 8):
            part = prompt[start : start + 8]
            params = None if start + 8 < length else GREEDY
            run_both(device, cpu, prefill_step(device, part, table, start=start, slot=slot, params=params))
    for _ in range(5):
        assert_equal(*run_both(device, cpu, decode_step(device, lengths, tables, [0, 1, 2])))
        lengths = [length + 1 for length in lengths]


def test_steps_launched_before_the_one_before_is_collected_give_the_same_tokens(
    device: CompiledDevice, cpu: CpuDevice
) -> None:
    table = [5, 9, 2, 30]
    steps = [prefill_step(device, tokens(8), table, params=GREEDY)]
    steps += [decode_step(device, [length], [table], [0], [GREEDY]) for length in range(8, 14)]
    expected = [cpu.collect(cpu.launch(step)).token_ids.tolist() for step in steps]
    found: list[list[int]] = []
    tickets: list[object] = []
    for step in steps:
        tickets.append(device.launch(with_graph(device, step)))
        if len(tickets) == device.limits.max_steps_in_flight:
            found.append(device.collect(tickets.pop(0)).token_ids.tolist())
    found += [device.collect(ticket).token_ids.tolist() for ticket in tickets]
    assert found == expected


def test_requests_that_sample_draw_the_tokens_of_the_cpu_device(device: CompiledDevice, cpu: CpuDevice) -> None:
    """What is counted for a slot grows in the graph from step to step."""
    params = [
        SamplingParams(temperature=1.5, repetition_penalty=1.4, seed=1),
        SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias={7: 1.5, 8: -2.0}),
        SamplingParams(temperature=0.8, top_k=9, top_p=0.8, min_p=0.01, min_tokens=4, stop_token_ids=(11,)),
    ]
    tables = [[5, 9, 2, 30], [12, 13, 14, 15], [17, 18, 19, 20]]
    prompt = tokens(6)
    for slot, row in enumerate(params):
        for one in (device, cpu):
            one.start_request(slot, RequestSpec("r", prompt, row))
        run_both(device, cpu, prefill_step(device, prompt, tables[slot], slot=slot, params=row))
    for output in range(1, 8):
        step = decode_step(
            device,
            [5 + output] * 3,
            tables,
            [0, 1, 2],
            params,
            num_outputs=[output] * 3,
            uniform=[0.07 * output, 0.5, 0.9 - 0.05 * output],
        )
        found, expected = run_both(device, cpu, step)
        assert found.token_ids.tolist() == expected.token_ids.tolist()


def test_every_graph_is_whole_static_and_made_of_core_operations(tiny_model: pathlib.Path) -> None:
    look = CoreAtenBackend()
    device = build_compiled(tiny_model, look, **BUCKETS)
    try:
        warm_up(device)
        assert len(look.operations) == len(device.declared_graphs())
        assert all(operations["aten.index_put.default"] >= 6 for operations in look.operations)
    finally:
        device.close()


def test_the_check_of_graphs_refuses_what_a_device_cannot_take() -> None:
    inputs = [torch.eye(2)]
    check_graph(make_fx(lambda x: x + 1)(*inputs), inputs)
    with pytest.raises(AssertionError, match="not core ATen"):
        check_graph(make_fx(torch.linalg.inv)(*inputs), inputs)
    with pytest.raises(AssertionError, match="nonzero"):
        check_graph(make_fx(torch.nonzero)(*inputs), inputs)
    with pytest.raises(AssertionError, match="has the shape"):
        check_graph(make_fx(lambda x: x + 1, tracing_mode="symbolic")(*inputs), inputs)


def test_the_runner_picks_the_graph_of_each_context(device: CompiledDevice, cpu: CpuDevice) -> None:
    """Two chunks and 14 decodes of a request cross the bucket of 16, as a scheduler sends them."""
    found = []
    for one in (device, cpu):
        runner, steps = NeuronModelRunner(one), Steps()
        prompt = tokens(10)
        runner.execute(steps.new("r", prompt, blocks=(5, 9), num_tokens=6, padded=8, sampling=GREEDY))
        outputs = runner.execute(steps.chunk("r", 4, padded=8, blocks=(2,))).sampled_token_ids
        for block in range(10, 24):
            blocks = {"r": [block]} if (len(outputs) + 9) % 4 == 3 else None
            outputs += runner.execute(steps.decode("r", blocks=blocks)).sampled_token_ids
        runner.reset()
        found.append(outputs)
    assert found[0] == found[1]
    assert len(found[0]) == 15


def test_a_graph_that_fails_does_not_stop_the_next(device: CompiledDevice, cpu: CpuDevice) -> None:
    with pytest.raises(ValueError, match="declared"):
        device.launch(dataclasses.replace(prefill_step(device, tokens(3), [5]), key=GraphKey(Phase.PREFILL, 8, 32)))
    assert_equal(*run_both(device, cpu, prefill_step(device, tokens(3), [5])))


def test_launching_does_not_wait_for_the_device(device: CompiledDevice) -> None:
    """A launch from another thread, while the worker is held up, returns."""
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait(30)

    blocker = device._worker.submit(hold)
    held.wait(30)
    ticket = device.launch(with_graph(device, prefill_step(device, tokens(3), [5])))
    assert not blocker.done()
    release.set()
    assert len(device.collect(ticket).token_ids) == 1


def test_a_graph_that_the_backend_cannot_compile_is_refused_in_one_sentence(tiny_model: pathlib.Path) -> None:
    def refuse(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        raise NotImplementedError("no instruction for it\nin this compiler")

    buckets: dict[str, Any] = {"prefill_buckets": (16,), "seqs_buckets": (2,), "context_buckets": (64,)}
    device = build_compiled(tiny_model, refuse, **buckets)
    with pytest.raises(ConfigError) as caught:
        warm_up(device)
    device.close()
    assert str(caught.value).startswith(
        "model is 'tiny', whose graph prefill of 16 tokens, context 0 cannot be compiled"
    )
    assert "no instruction for it in this compiler" in str(caught.value)
