"""Calls of the sampler with every knob defaulted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from executor_svc.sampler import Sampled, Sampler
from holdback.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
EOS = 2


def sample(
    logits: Sequence[Sequence[float]] | torch.Tensor,
    *params: SamplingParams | None,
    uniform: Sequence[float] | None = None,
    num_outputs: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    sampler: Sampler | None = None,
) -> Sampled:
    rows = torch.as_tensor(logits, dtype=torch.float32)
    sampler = sampler or Sampler(max_num_seqs=8, vocab_size=rows.shape[1], eos_token_ids=[EOS])
    return sampler.sample(
        rows,
        params,
        num_outputs or [0] * len(rows),
        torch.tensor(uniform or [0.5] * len(rows), dtype=torch.float32),
        slots or list(range(len(rows))),
    )


def one(logits: Sequence[float], uniform: float = 0.5, num_outputs: int = 0, **params: Any) -> int:
    """The token of a row alone."""
    found = sample([logits], SamplingParams(**params), uniform=[uniform], num_outputs=[num_outputs])
    return int(found.token_ids[0])


def log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]
