"""Log-probabilities of sampled tokens: of which token, by which logits, and in which order."""

from __future__ import annotations

import math

import pytest
import torch

from holdback.types import SamplingParams
from tests.executor.sampling import GREEDY, log, sample


@pytest.mark.case("B48")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_sampled_token_has_one_entry_and_it_is_of_that_token(temperature: float) -> None:
    """Rows that ask beside rows that do not, with and without what changes their logits, over several outputs."""
    rows = [
        SamplingParams(temperature=temperature, num_logprobs=2),
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, num_logprobs=2, logit_bias={5: 100.0}),
        SamplingParams(temperature=temperature, num_logprobs=2, top_k=1),
    ]
    logits = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(logits, dim=-1)
    for output in range(8):
        found = sample(logits, *rows, uniform=[(output + 0.5) / 8] * 4, num_outputs=[output] * 4)
        assert len(found.logprobs) == 4
        assert found.logprobs[1] is None
        for row in (0, 2, 3):
            entry, token = found.logprobs[row], int(found.token_ids[row])
            assert entry is not None
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(expected[row, token]), abs=1e-6)
            assert list(entry.top_token_ids) == expected[row].topk(2).indices.tolist()
        assert int(found.token_ids[2]) == 5


def test_logprobs_are_of_the_models_logits_whatever_was_done_to_them() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={3: 100.0}, num_logprobs=2)
    found = sample([log(0.4, 0.2, 0.3, 0.1)], params).logprobs[0]
    assert found is not None
    assert found.token_id == 3
    assert found.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert found.top_token_ids == (0, 2)
    assert found.top_logprobs == pytest.approx(log(0.4, 0.3), abs=1e-6)


def test_logprobs_of_0_are_of_the_chosen_token_alone() -> None:
    found = sample([log(0.4, 0.5, 0.1)], SamplingParams(temperature=0.0, num_logprobs=0)).logprobs[0]
    assert found is not None
    assert (found.token_id, found.top_token_ids, found.top_logprobs) == (1, (), ())


def test_logprobs_are_none_where_not_asked_for_and_empty_when_no_row_asks() -> None:
    asks = SamplingParams(temperature=0.0, num_logprobs=1)
    found = sample([[1.0, 0.0, 0.0]] * 2, GREEDY, asks)
    assert found.logprobs[0] is None
    assert found.logprobs[1] is not None
    assert sample([[1.0, 0.0, 0.0]], GREEDY).logprobs == []


def test_equal_logprobs_are_listed_by_id() -> None:
    found = sample([[0.0, 1.0, 1.0, 1.0]], SamplingParams(temperature=0.0, num_logprobs=3)).logprobs[0]
    assert found is not None
    assert found.top_token_ids == (1, 2, 3)
