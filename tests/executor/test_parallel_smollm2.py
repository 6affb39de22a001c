"""The real model over two and three ranks: the tokens of the whole one in float32.

Two ranks do not divide its 9 heads, which so stay whole; three do.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.devices import create_device
from executor_svc.runner import NeuronModelRunner
from holdback.types import SamplingParams
from tests.executor.builders import Steps

pytestmark = pytest.mark.model

PROMPT = [504, 3575, 282, 4649, 314]  # "The capital of France is"
OTHER = [*PROMPT, 7042, 30, 198, 504, 2988, 314]
NUM_TOKENS = 12


def generate(directory: pathlib.Path, size: int) -> list[list[int]]:
    """Greedy and drawn tokens of two requests, alone and together."""
    settings: dict[str, Any] = {"scheduler": "127.0.0.1:1", "model": directory, "dtype": "float32"}
    shapes: dict[str, Any] = {
        "max_model_len": 64,
        "num_batched_tokens_buckets": (16,),
        "num_seqs_buckets": (2,),
        "num_blocks": 16,
    }
    device = create_device(ExecutorConfig(**settings, **shapes, tensor_parallel_size=size))
    try:
        runner, steps = NeuronModelRunner(device), Steps()
        greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.9, seed=3)
        found = [
            runner.execute(steps.new("greedy", PROMPT, blocks=[1, 2], padded=16, sampling=greedy)).sampled_token_ids,
            runner.execute(
                steps.new("drawn", OTHER, slot=1, blocks=[3, 4], padded=16, sampling=drawn)
            ).sampled_token_ids,
        ]
        return found + [runner.execute(steps.decode("greedy", "drawn")).sampled_token_ids for _ in range(NUM_TOKENS)]
    finally:
        device.close()


@pytest.mark.timeout(300)
def test_two_and_three_ranks_give_the_tokens_of_one(model_directory: pathlib.Path) -> None:
    num_threads = torch.get_num_threads()
    try:
        whole = generate(model_directory, 1)
        assert generate(model_directory, 2) == whole
        assert generate(model_directory, 3) == whole
    finally:
        torch.set_num_threads(num_threads)
