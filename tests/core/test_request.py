"""Counters of a request, and what is refused at submission."""

import pytest

from holdback.errors import ErrorReason, InvalidArgumentError
from holdback.types import FinishReason, ModelInfo, RequestSpec, SamplingParams, Usage
from scheduler_svc.core.request import Request, check_request
from tests.core.builders import EOS, build_request

MODEL = ModelInfo("f", "m", vocab_size=128, eos_token_ids=(EOS,), max_model_len=16)


def check(prompt=(1, 2, 3), outputs=(), **sampling):
    check_request(RequestSpec("r", prompt, SamplingParams(**sampling), output_token_ids=outputs), MODEL)


def test_prefill_covers_the_prompt_and_the_outputs_that_came_with_it():
    request = build_request(prompt=5, outputs=[50, 51])
    assert (request.num_prompt_tokens, request.num_prefill_tokens, request.num_tokens) == (5, 7, 7)
    assert request.is_prefill


def test_a_request_is_prefilling_until_all_of_it_is_computed():
    request = build_request(prompt=5)
    for num_computed, is_prefill in ((0, True), (4, True), (5, False), (6, False)):
        request.num_computed_tokens = num_computed
        assert request.is_prefill is is_prefill


def test_placeholders_are_the_outputs_of_steps_in_flight():
    request = build_request(prompt=5)
    request.num_computed_tokens = 4
    assert request.num_output_placeholders == 0
    request.num_computed_tokens = 5
    assert request.num_output_placeholders == 1
    request.num_computed_tokens = 6
    assert request.num_output_placeholders == 2
    request.output_token_ids += [50, 51]
    assert request.num_output_placeholders == 0


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 2, [100, 101]), (1, 5, [101, 102, 50, 51]), (3, 5, [50, 51]), (4, 5, [51]), (0, 3, [100, 101, 102])],
)
def test_prompt_and_outputs_are_one_sequence(start, stop, expected):
    assert list(build_request(prompt=3, outputs=[50, 51]).token_ids(start, stop)) == expected


def test_max_tokens_is_cut_to_what_fits_behind_the_prompt_and_never_raised():
    request = build_request(prompt=10, max_tokens=100)
    request.limit_length(16)
    assert request.max_tokens == 6
    request.limit_length(64)
    assert request.max_tokens == 6
    assert request.spec.sampling.max_tokens == 100


@pytest.mark.parametrize(
    ("sampling", "outputs", "expected"),
    [
        ({}, [50, 51], (None, None)),
        ({}, [50, EOS], (FinishReason.STOP, None)),
        ({"ignore_eos": True}, [50, EOS], (None, None)),
        ({"stop_token_ids": (9,)}, [50, 9], (FinishReason.STOP, 9)),
        ({"stop_token_ids": (EOS,)}, [50, EOS], (FinishReason.STOP, None)),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, [50, EOS], (FinishReason.STOP, EOS)),
        ({"max_tokens": 2}, [50, 51], (FinishReason.LENGTH, None)),
        ({"max_tokens": 2}, [50, EOS], (FinishReason.STOP, None)),
        ({"max_tokens": 2, "ignore_eos": True}, [50, EOS], (FinishReason.LENGTH, None)),
        ({"min_tokens": 3}, [50, EOS], (None, None)),
        ({"min_tokens": 2}, [50, EOS], (FinishReason.STOP, None)),
    ],
)
def test_an_ending_is_eos_then_a_stop_id_then_length(sampling, outputs, expected):
    request = build_request(**{"max_tokens": 8, **sampling})
    request.output_token_ids = list(outputs)
    assert request.ending(outputs[-1]) == expected


@pytest.mark.case("B37")
@pytest.mark.parametrize(
    ("sampling", "max_tokens", "expected"),
    [
        ({"ignore_eos": True, "stop_token_ids": (9,)}, 8, (4, FinishReason.STOP, 9)),
        ({"ignore_eos": True}, 5, (5, FinishReason.LENGTH, None)),
        ({"stop_token_ids": (9,)}, 8, (2, FinishReason.STOP, None)),
        ({}, 2, (2, FinishReason.STOP, None)),
    ],
)
def test_end_ids_of_the_model_and_stop_ids_of_the_user_are_told_apart(sampling, max_tokens, expected):
    """End ids {2, 5}; the model says 4, 5, 2, 9, 4."""
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    request = Request("r", RequestSpec("r", [1, 2, 3], params), (2, 5))
    for token_id in (4, 5, 2, 9, 4):
        request.output_token_ids.append(token_id)
        reason, stop_token_id = request.ending(token_id)
        if reason is not None:
            break
    assert (len(request.output_token_ids), reason, stop_token_id) == expected


def test_a_continuation_prefills_what_was_produced_and_keeps_its_promises():
    request = build_request("r", prompt=5, max_tokens=8, seed=7)
    request.output_token_ids += [50, 51, 52]
    request.num_computed_tokens, request.slot, request.num_cached_tokens = 7, 3, 4
    again = request.continuation()
    assert again.req_id == "r"
    assert again.output_token_ids == [50, 51, 52]
    assert again.spec.output_token_ids == (50, 51, 52)
    assert again.spec.sampling == request.spec.sampling
    assert (again.num_prompt_tokens, again.num_prefill_tokens, again.num_computed_tokens) == (5, 8, 0)
    assert (again.slot, again.block_ids, again.is_first_run) == (None, [], False)
    assert again.usage() == Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=4)
    request.output_token_ids.append(53)
    assert again.output_token_ids == [50, 51, 52]


@pytest.mark.case("B10")
@pytest.mark.parametrize("num_prompt", [16, 17])
def test_a_prompt_that_fills_max_model_len_is_refused_with_both_numbers(num_prompt):
    with pytest.raises(
        InvalidArgumentError, match=f"prompt_token_ids is {num_prompt} tokens; allowed: at most 15"
    ) as info:
        check(prompt=[1] * num_prompt)
    assert info.value.reason is ErrorReason.PROMPT_TOO_LONG
    assert info.value.field == "prompt_token_ids"


@pytest.mark.case("B10")
def test_a_prompt_that_leaves_room_for_one_token_is_accepted():
    check(prompt=[1] * 15, max_tokens=100)


def test_outputs_so_far_count_for_the_length():
    check(prompt=[1] * 10, outputs=[1] * 5, max_tokens=6)
    with pytest.raises(InvalidArgumentError, match="10 tokens with 6 outputs so far"):
        check(prompt=[1] * 10, outputs=[1] * 6, max_tokens=7)


@pytest.mark.case("B50")
def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidArgumentError, match="prompt_token_ids is '0 tokens'; allowed: at least 1") as info:
        check(prompt=())
    assert info.value.reason is ErrorReason.PROMPT_EMPTY


@pytest.mark.case("B35")
@pytest.mark.parametrize(
    ("knobs", "field", "value"),
    [
        ({"prompt": [1, 2, 3, 128, 5]}, "prompt_token_ids[3]", "128"),
        ({"prompt": [-1, 2]}, "prompt_token_ids[0]", "-1"),
        ({"outputs": [1, 999]}, "output_token_ids[1]", "999"),
        ({"stop_token_ids": (5, 128)}, "sampling.stop_token_ids[1]", "128"),
        ({"allowed_token_ids": (-3,)}, "sampling.allowed_token_ids[0]", "-3"),
        ({"logit_bias": {7: 1.0, 200: 1.0}}, "sampling.logit_bias", "200"),
    ],
)
def test_a_token_outside_the_vocabulary_is_refused_by_its_place(knobs, field, value):
    with pytest.raises(InvalidArgumentError, match=r"allowed: \[0, 128\)") as info:
        check(**knobs)
    assert (info.value.field, info.value.value) == (field, value)
    assert info.value.reason is ErrorReason.TOKEN_OUT_OF_VOCABULARY


@pytest.mark.parametrize(("max_tokens", "outputs"), [(0, ()), (-1, ()), (2, (1, 2))])
def test_nothing_left_to_produce_is_refused(max_tokens, outputs):
    with pytest.raises(InvalidArgumentError, match=f"sampling.max_tokens is {max_tokens}"):
        check(outputs=outputs, max_tokens=max_tokens)
