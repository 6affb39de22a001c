"""What a machine and a model allow: measured bandwidth and arithmetic, and the least time that work takes with them."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

ATTEMPTS = 5


@dataclass(frozen=True)
class Machine:
    """Measured by PyTorch on all cores.

    Attributes:
        read_gb_s: of memory that no cache holds.
        gemm_gflop_s: products of bfloat16 matrices.
    """

    read_gb_s: float
    gemm_gflop_s: float


def measure_machine() -> Machine:
    numbers = torch.ones(2**27, dtype=torch.float32)  # 512 MiB
    left, right = (torch.ones(2048, 2048, dtype=torch.bfloat16) for _ in range(2))
    read_s = _least_s(lambda: numbers.sum())
    gemm_s = _least_s(lambda: left @ right)
    return Machine(numbers.nbytes / read_s / 1e9, 2 * 2048**3 / gemm_s / 1e9)


def _least_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ATTEMPTS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


@dataclass(frozen=True)
class Costs:
    """Of a dense decoder-only model in bfloat16.

    Attributes:
        layer_params: numbers in the decoder layers.
        head_params: numbers in the output layer.
        kv_bytes: of one token's keys and values.
    """

    layer_params: int
    head_params: int
    kv_bytes: int

    @classmethod
    def of(cls, model: pathlib.Path) -> Costs:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        kv_width = (config.get("num_key_value_heads") or heads) * head_dim
        layer = 2 * hidden * (heads * head_dim + kv_width) + 3 * hidden * config["intermediate_size"]
        layers = config["num_hidden_layers"]
        return cls(layers * layer, config["vocab_size"] * hidden, layers * 2 * kv_width * 2)

    def prefill_s(self, machine: Machine, num_tokens: int) -> float:
        return 2 * self.layer_params * num_tokens / machine.gemm_gflop_s / 1e9

    def decode_s(self, machine: Machine, streams: int, context: int) -> float:
        """One step: reading weights and contexts, or the arithmetic, whichever takes longer."""
        params = self.layer_params + self.head_params
        read_s = (2 * params + streams * context * self.kv_bytes) / machine.read_gb_s / 1e9
        return max(read_s, 2 * params * streams / machine.gemm_gflop_s / 1e9)

    def run_s(self, machine: Machine, streams: int, num_prompt_tokens: int, max_tokens: int) -> float:
        """All prompts, then all outputs but the first."""
        context = num_prompt_tokens + max_tokens // 2
        prefill_s = self.prefill_s(machine, streams * num_prompt_tokens)
        return prefill_s + (max_tokens - 1) * self.decode_s(machine, streams, context)
