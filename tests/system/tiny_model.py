"""A tiny random model with a tokenizer, pools of executors that run it on the CPU, and what it answers without them."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from executor_svc.config import ExecutorConfig
from executor_svc.devices import create_device
from executor_svc.runner import NeuronModelRunner
from holdback.types import SamplingParams, TokenLogprobs
from tests.executor.builders import Steps
from tests.executor.tiny_models import llama_config, save_model
from tests.gateway.small_tokenizers import make_tokenizer, save_directory

VOCAB_SIZE = 512
MAX_MODEL_LEN = 512
CHUNK = 32
BLOCK_SIZE = 16
NUM_BLOCKS = 1 + 8 * MAX_MODEL_LEN // BLOCK_SIZE
SHAPES: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "num_blocks": NUM_BLOCKS,
    "num_batched_tokens_buckets": (CHUNK,),
    "num_seqs_buckets": (1, 2, 4, 8),
    "num_threads": 1,
}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, num_logprobs=1)


def save_tiny_model(directory: pathlib.Path) -> pathlib.Path:
    """A model directory with everything that executors and gateways read."""
    save_model(directory, llama_config(vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_MODEL_LEN))
    return save_directory(directory, make_tokenizer("byte_level"))


def stack_arguments(model: pathlib.Path, **settings: Any) -> dict[str, list[str]]:
    """Arguments of a `LocalStack`; `settings` are those of its executors."""
    executor: list[str] = ["--model", str(model)]
    for name, value in (SHAPES | settings).items():
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        executor += [f"--{name.replace('_', '-')}", shown]
    return {"executor": executor, "gateway": ["--tokenizer", str(model), "--served-model-name", "tiny"]}


def answer_alone(
    model: pathlib.Path, prompts: Sequence[Sequence[int]], num_tokens: int, **settings: Any
) -> list[list[TokenLogprobs]]:
    """Greedy outputs of an executor in this process, one request after the other, each prefilled in one chunk.

    Shapes are those of the pools, so each step has the tensors that it has for a request that is alone there.
    """
    config: dict[str, Any] = {"scheduler": "127.0.0.1:1", "model": model} | SHAPES | settings
    device = create_device(ExecutorConfig(**config))
    try:
        runner, steps = NeuronModelRunner(device), Steps()
        return [_answer(runner, steps, f"r{row}", prompt, num_tokens) for row, prompt in enumerate(prompts)]
    finally:
        device.close()


def _answer(
    runner: NeuronModelRunner, steps: Steps, req_id: str, prompt: Sequence[int], num_tokens: int
) -> list[TokenLogprobs]:
    blocks = range(1, 2 + (len(prompt) + num_tokens) // BLOCK_SIZE)
    step = steps.new(req_id, prompt, blocks=blocks, padded=CHUNK, sampling=GREEDY)
    found: list[TokenLogprobs] = []
    while len(found) < num_tokens:
        (entry,) = runner.execute(step).logprobs
        assert entry is not None
        found.append(entry)
        step = steps.decode(req_id)
    runner.execute(steps.finish(req_id))
    return found
