"""Sampling: what each parameter does to a row, and that rows do not influence each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_svc.draw import draw, keep_mask
from executor_svc.random_numbers import mix_seed, uniform_numbers
from executor_svc.sampler import Sampler
from holdback.errors import InvalidArgumentError
from holdback.types import RequestSpec, SamplingParams
from tests.executor.sampling import EOS, GREEDY, log, one, sample


def distribution(logits: Sequence[float], **params: Any) -> dict[int, float]:
    """Share of each token over a fine grid of random numbers."""
    grid = torch.arange(1000) / 1000 + 0.0005
    rows = torch.tensor([logits]).expand(1000, -1)
    drawn = draw(rows.contiguous(), [SamplingParams(**params)] * 1000, grid)
    return {token: count / 1000 for token, count in sorted(Counter(drawn.tolist()).items())}


# Greedy


@pytest.mark.case("B29")
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_greedy_takes_the_first_of_equal_logits_alone_and_among_sampling_rows(top_p: float) -> None:
    greedy = SamplingParams(temperature=0.0, top_p=top_p)
    for run in range(200):
        uniform = [run / 200, run / 200]
        assert sample([[1.0, 1.0, 0.0]], greedy, uniform=uniform[:1]).token_ids.tolist() == [0]
        mixed = sample([[1.0, 1.0, 0.0]] * 2, greedy, SamplingParams(temperature=1.0), uniform=uniform)
        assert int(mixed.token_ids[0]) == 0


def test_a_padding_row_is_greedy() -> None:
    assert sample([[0.0, 3.0, 1.0]], None).token_ids.tolist() == [1]


# Distributions


def test_temperature_1_draws_from_the_softmax_in_order_of_ids() -> None:
    assert distribution(log(0.5, 0.2, 0.3)) == pytest.approx({0: 0.5, 1: 0.2, 2: 0.3}, abs=0.001)
    assert [one(log(0.5, 0.2, 0.3), uniform=u) for u in (0.0, 0.49, 0.51, 0.69, 0.71, 0.999)] == [0, 0, 1, 1, 2, 2]


def test_temperature_divides_the_logits() -> None:
    # squares of 1/2, 1/4, 1/4 are 4, 1, 1 of 6
    found = distribution(log(0.5, 0.25, 0.25), temperature=0.5)
    assert found == pytest.approx({0: 4 / 6, 1: 1 / 6, 2: 1 / 6}, abs=0.001)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, {0: 4 / 7, 2: 3 / 7}),
        ({"top_k": 1}, {0: 1.0}),
        ({"top_k": 100}, {0: 0.4, 1: 0.2, 2: 0.3, 3: 0.1}),
        ({"top_p": 0.4}, {0: 1.0}),
        ({"top_p": 0.41}, {0: 4 / 7, 2: 3 / 7}),
        ({"top_p": 0.0}, {0: 1.0}),
        ({"min_p": 0.49}, {0: 4 / 9, 1: 2 / 9, 2: 3 / 9}),
        ({"min_p": 0.6}, {0: 4 / 7, 2: 3 / 7}),
        ({"min_p": 1.0}, {0: 1.0}),
        # top_p counts among what top_k leaves: 4/7 is above 0.5, 4/9 of the other two is not
        ({"top_k": 2, "top_p": 0.5}, {0: 1.0}),
        ({"top_k": 3, "top_p": 0.5}, {0: 4 / 7, 2: 3 / 7}),
        ({"min_p": 0.6, "top_p": 0.5}, {0: 1.0}),
    ],
)
def test_filters_keep_the_most_likely_tokens(params: dict[str, Any], expected: dict[int, float]) -> None:
    assert distribution(log(0.4, 0.2, 0.3, 0.1), **params) == pytest.approx(expected, abs=0.001)


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.5}])
def test_of_equal_tokens_the_lower_ids_are_kept(params: dict[str, Any]) -> None:
    assert distribution([1.0, 1.0, 1.0, 1.0], **params) == {0: 0.5, 1: 0.5}


def test_a_nucleus_larger_than_what_is_sorted_at_first_is_exact() -> None:
    """1,000 equal tokens: top_p 0.5 keeps 500, 0.7501 keeps 751."""
    for top_p, expected in [(0.5, 500), (0.7501, 751), (0.2, 200)]:
        mask = keep_mask(torch.zeros(1, 1000), [SamplingParams(top_p=top_p)])
        assert mask.sum() == expected
        assert mask[0, :expected].all()
    for min_p, expected in [(1e-9, 1000), (0.5, 600)]:
        logits = torch.cat([torch.zeros(600), torch.full((400,), -1.0)])[None]
        assert keep_mask(logits, [SamplingParams(min_p=min_p)]).sum() == expected


@pytest.mark.case("B28")
def test_rows_without_top_k_keep_the_whole_vocabulary_in_a_mixed_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(128, generator=generator)
    rows = [
        GREEDY,
        SamplingParams(temperature=1.0, top_k=64, top_p=0.95),
        SamplingParams(temperature=1.0, top_k=None),
        SamplingParams(temperature=1.0, top_k=1000),
    ]
    top64 = set(logits.topk(64).indices.tolist())
    seen: list[set[int]] = [set(), set(), set(), set()]
    sampler = Sampler(4, 128, [EOS])
    for number in range(300):
        uniform = [number / 300] * 4
        batch = sample(logits.expand(4, -1), *rows, uniform=uniform, sampler=sampler).token_ids.tolist()
        alone = [int(sample(logits[None], row, uniform=uniform[:1], sampler=sampler).token_ids[0]) for row in rows]
        assert batch == alone
        for row, token in zip(seen, batch, strict=True):
            row.add(token)
    assert seen[0] == {int(logits.argmax())}
    assert seen[1] <= top64
    assert len(seen[2] - top64) > 10
    assert seen[2] == seen[3]


# Extremes


@pytest.mark.case("B30")
@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-60, 0.0])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_tiny_temperatures_take_the_most_likely_token(temperature: float, uniform: float) -> None:
    found = sample([[30, 29.9, -50]], SamplingParams(temperature=temperature), uniform=[uniform])
    assert found.token_ids.tolist() == [0]
    assert found.failed_rows == []


@pytest.mark.case("B30")
@pytest.mark.parametrize("penalty", [1e-30, 1e-38, 1e-45, 5e-324])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_repetition_penalty_near_0_draws_a_token_that_was_seen(penalty: float, temperature: float) -> None:
    """The quotient is beyond float32; an infinite logit would give no distribution, and an id beyond the vocabulary."""
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    sampler = Sampler(4, 3, [EOS])
    sampler.start_request(0, RequestSpec("r", [0, 1], params))
    found = [int(sample([[29.0, 30.0, 50.0]], params, uniform=[u], sampler=sampler).token_ids[0]) for u in (0.0, 0.999)]
    assert set(found) <= {0, 1}
    assert int(sample([[-3.0, -4.0, -50.0]], params, sampler=sampler).token_ids[0]) in (0, 1)


@pytest.mark.case("B30")
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0, 1000.0])
def test_the_largest_biases_on_the_largest_logits_draw_a_token_that_is_there(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, logit_bias={0: 100.0, 1: -100.0})
    for logits in ([3.4e38, 3.4e38, 0.0], [-3.4e38, -3.4e38, -3.4e38], [0.0, 0.0, 0.0]):
        for uniform in (0.0, 0.5, 1 - 2**-24):
            found = sample([logits, [0.0, 1.0, 2.0]], params, GREEDY, uniform=[uniform, 0.5])
            assert int(found.token_ids[0]) in range(3)
            assert found.failed_rows == []
            assert int(found.token_ids[1]) == 2
    assert one([0.0, 0.0, 0.0], temperature=min(temperature, 1.0), logit_bias={1: 100.0}) == 1


@pytest.mark.case("B30")
def test_top_p_0_keeps_exactly_one_token_among_equals() -> None:
    assert distribution([1.0, 1.0, 0.0], top_p=0.0) == {0: 1.0}
    assert distribution([0.0, 1.0, 1.0], top_p=0.0, temperature=100.0) == {1: 1.0}


def test_a_huge_temperature_is_uniform_and_large_logits_do_not_overflow() -> None:
    assert distribution([30.0, 29.9, -50.0, 0.0], temperature=999_999.0) == pytest.approx(
        dict.fromkeys(range(4), 0.25), abs=0.002
    )
    assert distribution([3e38, 3e38, -3e38]) == {0: 0.5, 1: 0.5}


def test_the_largest_random_number_draws_a_token_that_can_be_drawn() -> None:
    """Tokens at the end whose probability is 0 are never drawn, whatever rounding does to the sum."""
    for size in (3, 1000, 50_000):
        logits = torch.full((size,), -math.inf)
        logits[: size // 2 + 1] = 0.0
        drawn = draw(logits[None], [SamplingParams()], torch.tensor([1 - 2**-24]))
        assert int(drawn) <= size // 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_with_token_0_and_the_others_go_on(bad: float) -> None:
    asks = SamplingParams(temperature=1.0, num_logprobs=1)
    found = sample([[0.0, 5.0, bad], [0.0, 9.0, 0.0], [bad, bad, bad]], asks, asks, GREEDY)
    assert found.failed_rows == [0, 2]
    assert found.token_ids.tolist() == [0, 1, 0]
    assert found.logprobs[0] is None
    assert found.logprobs[1] is not None
    assert found.logprobs[2] is None


# Seeds


@pytest.mark.case("B32")
def test_a_seed_gives_the_same_tokens_whoever_shares_the_batch() -> None:
    """Seed 42 and temperature 0.8 on uniform logits: alone, beside others, and in another row and slot each step."""
    params = SamplingParams(temperature=0.8, seed=42)
    filtered = SamplingParams(temperature=1.3, top_p=0.9, seed=7)

    def number(seed: int, output: int) -> float:
        return float(uniform_numbers(np.array([mix_seed(seed)], np.uint64), np.array([output], np.int32))[0])

    def run(peers: Sequence[SamplingParams], row: int) -> list[int]:
        sampler = Sampler(8, 100, [EOS])
        answer = []
        for output in range(16):
            rows = [*peers[:row], params, *peers[row:]]
            uniform = [number(one.seed, output) for one in rows]
            slots = [(slot + output) % 8 for slot in range(len(rows))]
            found = sample(torch.zeros(len(rows), 100), *rows, uniform=uniform, slots=slots, sampler=sampler)
            answer.append(int(found.token_ids[row]))
        return answer

    alone = run([], 0)
    assert len(set(alone)) > 8
    assert run([SamplingParams(temperature=1.0, seed=1)], 0) == alone
    assert run([filtered], 1) == alone
    assert run([GREEDY, filtered, params], 3) == alone


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_gets_the_same_token_in_any_batch(data: st.DataObject) -> None:
    def any_params() -> st.SearchStrategy[SamplingParams]:
        return st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
            top_k=st.sampled_from([None, 1, 3, 300, 700]),
            top_p=st.sampled_from([1.0, 0.999, 0.6, 0.05]),
            min_p=st.sampled_from([0.0, 0.001, 0.4]),
        )

    rows = data.draw(st.lists(any_params(), min_size=1, max_size=6))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    # rounded, so that there are many equal logits
    logits = (torch.randn(len(rows), 700, generator=generator) * data.draw(st.sampled_from([0.5, 3.0]))).round(
        decimals=1
    )
    uniform = torch.rand(len(rows), generator=generator).tolist()
    batch = sample(logits, *rows, uniform=uniform).token_ids.tolist()
    for row, params in enumerate(rows):
        alone = sample(logits[row : row + 1], params, uniform=[uniform[row]])
        assert alone.token_ids.tolist() == [batch[row]]


def test_a_row_of_a_real_vocabulary_has_the_same_distribution_function_in_any_batch() -> None:
    """Long rows are where sums are split among threads; random numbers at each token's edge would show it."""
    logits = torch.randn(8, 49_152, generator=torch.Generator().manual_seed(0)) * 3
    rows = [SamplingParams(temperature=0.9, top_p=top_p) for top_p in (1.0, 0.95)] * 4
    edges = torch.softmax(logits / 0.9, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    for token in range(100, 49_152, 12_007):
        uniform = edges[:, token].float().clamp(max=1 - 2**-24)
        batch = draw(logits, rows, uniform).tolist()
        alone = [int(draw(logits[row : row + 1], [rows[row]], uniform[row : row + 1])) for row in range(8)]
        assert batch == alone


# What changes logits


def test_logit_bias_is_added() -> None:
    assert one([3.0, 1.0, 0.0], temperature=0.0, logit_bias={1: 1.5, 2: 3.5}) == 2
    assert one([3.0, 1.0, 0.0], temperature=0.0, logit_bias={0: -100.0}) == 1


def test_only_allowed_tokens_are_sampled() -> None:
    assert one([9.0, 1.0, 5.0], temperature=0.0, allowed_token_ids=(1, 2)) == 2
    assert distribution_of_sampler([9.0, 1.0, 1.0], allowed_token_ids=(1, 2)) == {1, 2}
    assert one([9.0, 1.0, 5.0], temperature=0.0, allowed_token_ids=(1,), logit_bias={0: 100.0}) == 1


def distribution_of_sampler(logits: Sequence[float], **params: Any) -> set[int]:
    return {one(logits, uniform=number / 50, **params) for number in range(50)}


def test_eos_and_stop_tokens_are_not_sampled_before_min_tokens() -> None:
    logits = [1.0, 2.0, 9.0, 8.0]
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (3,)}
    assert [one(logits, num_outputs=outputs, **params) for outputs in (0, 1, 2)] == [1, 1, 2]
    params["temperature"] = 1.0
    assert all(one(logits, uniform=u / 20, num_outputs=1, **params) in (0, 1) for u in range(20))


def test_a_ban_that_would_leave_nothing_is_not_made() -> None:
    assert one([1.0, 2.0, 0.0], temperature=0.0, min_tokens=5, allowed_token_ids=(EOS,)) == EOS


@pytest.mark.case("B30")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ban_of_the_whole_vocabulary_is_not_made(temperature: float) -> None:
    """Stop tokens that are, with the end of the model, all there is."""
    for params in ({"stop_token_ids": (0, 1, 2)}, {"stop_token_ids": (0, 1)}, {"stop_token_ids": (2, 1, 0, 1)}):
        found = one([1.0, 50.0, 0.0], temperature=temperature, min_tokens=5, **params)
        assert found == 1


@pytest.mark.case("B30")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_large_repetition_penalty_leaves_a_token_to_draw(temperature: float) -> None:
    """Ten times the lowest logits is beyond float32: all of a seen vocabulary would be excluded."""
    params = SamplingParams(temperature=temperature, repetition_penalty=10.0, allowed_token_ids=(1,))
    sampler = Sampler(4, 3, [EOS])
    sampler.start_request(0, RequestSpec("r", [0, 1, 2], params))
    assert int(sample([[3e38, -3e38, -3e38]], params, uniform=[0.999], sampler=sampler).token_ids[0]) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_number_draws_a_token_of_the_vocabulary(value: float) -> None:
    params = [SamplingParams(temperature=1.0)]
    assert int(draw(torch.full((1, 40), value), params, torch.tensor([0.999]))) in range(40)


def test_penalties_start_from_prompt_and_outputs_and_count_what_is_sampled() -> None:
    """frequency 1 and presence 0.5 count outputs only; token 4 is in the prompt alone and keeps its logit."""
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, presence_penalty=0.5)
    sampler = Sampler(4, 5, [EOS])
    sampler.start_request(3, RequestSpec("r", [4, 4], params, output_token_ids=[0]))
    logits = [[4.0, 3.9, -9.0, 3.0, 2.3]]
    # 0 starts at 4 - 1 - 0.5 = 2.5; 1: 3.9 then 2.4; 3: 3.0 then 1.5; then 2.5, 2.4, 2.3
    found = [int(sample(logits, params, slots=[3], sampler=sampler).token_ids[0]) for _ in range(5)]
    assert found == [1, 3, 0, 1, 4]


def test_repetition_penalty_counts_prompt_and_outputs_and_pushes_negative_logits_down() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    sampler = Sampler(4, 5, [EOS])
    sampler.start_request(0, RequestSpec("gone", [3], params))
    sampler.start_request(0, RequestSpec("r", [0], params, output_token_ids=[1]))
    assert int(sample([[8.0, 6.0, 0.0, 3.9, 0.0]], params, sampler=sampler).token_ids[0]) == 0  # 4, 3, 0, 3.9
    sampler.start_request(0, RequestSpec("r", [0, 1], params))
    assert int(sample([[-1.0, -1.5, -9.0, -2.5, -9.0]], params, sampler=sampler).token_ids[0]) == 0  # -2, -3, -2.5
    sampler.start_request(0, RequestSpec("r", [0, 1], params))
    assert int(sample([[-1.3, -1.5, -9.0, -2.5, -9.0]], params, sampler=sampler).token_ids[0]) == 3  # -2.6, -3, -2.5


def test_a_slot_given_to_another_request_counts_from_nothing() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    sampler = Sampler(4, 3, [EOS])
    sampler.start_request(1, RequestSpec("old", [1], params, output_token_ids=[0, 0]))
    assert int(sample([[2.0, 1.0, 0.0]], params, slots=[1], sampler=sampler).token_ids[0]) == 1
    sampler.start_request(1, RequestSpec("new", [1], params))
    assert int(sample([[2.0, 1.0, 0.0]], params, slots=[1], sampler=sampler).token_ids[0]) == 0


def test_rows_with_penalties_leave_the_logits_of_other_rows_alone() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    sampler = Sampler(4, 3, [EOS])
    sampler.start_request(0, RequestSpec("r", [1], params, output_token_ids=[0]))
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    assert sample(logits, params, GREEDY, sampler=sampler).token_ids.tolist() == [1, 0]
    assert logits.tolist() == [[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]]


@pytest.mark.case("B35")
@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {512: 5.0}}, "logit_bias is 512"),
        ({"logit_bias": {-1: 5.0}}, "logit_bias is -1"),
        ({"stop_token_ids": (99999,)}, "stop_token_ids is 99999"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids is -1"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_before_they_index_anything(
    params: dict[str, Any], field: str
) -> None:
    sampler = Sampler(4, 512, [EOS])
    with pytest.raises(InvalidArgumentError, match=rf"{field}; allowed: \[0, 512\)"):
        sampler.start_request(0, RequestSpec("r", [1], SamplingParams(**params)))
