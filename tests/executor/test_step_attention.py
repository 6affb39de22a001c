"""Attention and experts of a compiled step on every family of models, beside the `cpu` device: windows, caps, sinks."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import torch

from executor_svc.devices import compiled
from executor_svc.devices.base import Device, StepInputs
from tests.executor.compiled_models import CoreAtenBackend, CountingBackend, build_compiled
from tests.executor.model_families import FAMILIES, save_family
from tests.executor.tiny_models import VOCAB_SIZE, build_device, decode_step, prefill_step, with_graph

TABLES = [[5, 9, 2, 30, 11, 12, 1, 20], [21, 22, 23, 24]]


@pytest.fixture
def without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step, run as it is written; that graphs compute what they were traced from is not asked here."""
    monkeypatch.setattr(compiled, "compile_step", lambda step, key, backend: step)


def logprobs(device: Device, inputs: StepInputs) -> torch.Tensor:
    """float32 [rows, vocab_size], by token id."""
    result = device.collect(device.launch(with_graph(device, inputs)))
    rows = torch.empty(len(result.logprobs), VOCAB_SIZE)
    for row, found in enumerate(result.logprobs):
        assert found is not None
        rows[row, list(found.top_token_ids)] = torch.tensor(found.top_logprobs)
    return rows


@pytest.mark.usefixtures("without_compiling", "one_thread")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_agrees_with_the_cpu_device_over_chunks_a_hit_and_decodes(
    tmp_path: pathlib.Path, family: str
) -> None:
    directory = save_family(tmp_path / "model", family)
    devices = [build_compiled(directory, CountingBackend()), build_device(directory)]
    prompt = [int(token) for token in np.random.default_rng(1).integers(3, VOCAB_SIZE, 21)]
    other = [*prompt[:8], *prompt[3:6]]
    found: list[list[torch.Tensor]] = []
    for device in devices:
        for start, end in ((0, 8), (8, 18)):
            step = prefill_step(device, prompt[start:end], TABLES[0], start=start, params=None)
            device.collect(device.launch(with_graph(device, step)))
        answers = [logprobs(device, prefill_step(device, prompt[18:], TABLES[0], start=18))]
        shared = [*TABLES[0][:2], *TABLES[1]]
        answers.append(logprobs(device, prefill_step(device, other[8:], shared, start=8, slot=1)))
        for output in range(3):
            lengths = [len(prompt) + output, len(other) + output]
            answers.append(logprobs(device, decode_step(device, lengths, [TABLES[0], shared], [0, 1])))
        found.append(answers)
        device.close()
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.compiled
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["gemma2", "qwen3-moe", "gpt-oss"])
def test_windows_caps_sinks_and_experts_are_core_operations_too(tmp_path: pathlib.Path, family: str) -> None:
    look = CoreAtenBackend()
    directory = save_family(tmp_path / "model", family)
    device = build_compiled(directory, look, prefill_buckets=(8,), seqs_buckets=(2,), context_buckets=(64,))
    try:
        for step in (
            prefill_step(device, [5, 6, 7], [5, 6], start=2),
            decode_step(device, [5], [[5, 6]], [0]),
        ):
            device.collect(device.launch(with_graph(device, step)))
        assert len(look.operations) == 2
    finally:
        device.close()
