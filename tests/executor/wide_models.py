"""Models of sizes that the kernels are made for, and what such a model says to prompts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.executor.tiny_models import decode_step, llama_config, prefill_step


def wide_llama(**overrides: Any) -> Any:
    """Of sizes that the layers can be fused for."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    return llama_config(**(sizes | heads | overrides))


def token_ids(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 128, length)]


def run_logits(device: Any, lengths: list[int]) -> list[Any]:
    """Prompts in two chunks, then all decoded in one batch: log-probabilities of the decode."""
    tables = [list(range(1 + 8 * slot, 9 + 8 * slot)) for slot in range(len(lengths))]
    for slot, length in enumerate(lengths):
        ids = token_ids(length, seed=slot)
        cut = length // 2
        device.collect(device.launch(prefill_step(device, ids[:cut], tables[slot], slot=slot, params=None)))
        device.collect(device.launch(prefill_step(device, ids[cut:], tables[slot], start=cut, slot=slot)))
    decode = decode_step(device, lengths, tables[: len(lengths)], list(range(len(lengths))))
    logprobs: list[Any] = device.collect(device.launch(decode)).logprobs
    return logprobs


def by_token(logprobs: Any) -> torch.Tensor:
    values = torch.empty(len(logprobs.top_token_ids))
    values[list(logprobs.top_token_ids)] = torch.tensor(logprobs.top_logprobs)
    return values
