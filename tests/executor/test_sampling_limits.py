"""Sampling parameters that cannot be are refused with the field's name, on every device, before a request starts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from executor_svc.runner import NeuronModelRunner
from holdback.errors import InvalidArgumentError
from holdback.types import SamplingParams
from tests.executor.builders import VOCAB_SIZE, Steps, build_device


@pytest.mark.case("B35")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (math.nan, math.inf, -0.5)],
        *[("top_k", value) for value in (0, -5)],
        *[(name, value) for name in ("top_p", "min_p") for value in (math.nan, -0.1, 3.0)],
        *[("repetition_penalty", value) for value in (math.nan, math.inf, 0.0, -1.0)],
        *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (math.nan, -math.inf, 2.5)],
        *[("logit_bias", {3: value}) for value in (math.nan, math.inf, -math.inf, 1e39)],
        ("logit_bias", {VOCAB_SIZE: 1.0}),
        ("stop_token_ids", (VOCAB_SIZE,)),
        *[("allowed_token_ids", value) for value in ((), (-1,), (VOCAB_SIZE,))],
        *[("num_logprobs", value) for value in (-1, 2**31)],
        ("max_tokens", 0),
        ("min_tokens", -1),
    ],
)
def test_what_cannot_be_is_refused_by_its_name_and_nothing_starts(field: str, value: Any) -> None:
    runner = NeuronModelRunner(build_device())
    params = SamplingParams(**{field: value})
    with pytest.raises(InvalidArgumentError, match=rf"^{field} is .*; allowed: ") as caught:
        runner.execute(Steps().new("bad", [20], sampling=params))
    assert caught.value.field == field
    assert runner.requests.slots == {}


def test_the_ends_of_each_range_are_taken() -> None:
    runner = NeuronModelRunner(build_device())
    extremes = SamplingParams(
        temperature=1e30,
        top_k=1,
        top_p=0.0,
        min_p=1.0,
        repetition_penalty=1e-45,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={0: -100.0, VOCAB_SIZE - 1: 100.0},
        stop_token_ids=(0, VOCAB_SIZE - 1),
        allowed_token_ids=(VOCAB_SIZE - 1,),
        num_logprobs=0,
        max_tokens=1,
    )
    output = runner.execute(Steps().new("r", [20], sampling=extremes))
    assert len(output.sampled_token_ids) == 1
