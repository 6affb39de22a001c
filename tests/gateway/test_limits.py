"""Every field has a limit, and what is outside is refused with field, value and limit before any work."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from gateway.calls import trace_context
from gateway.limits import check_generation
from holdback.errors import ErrorReason, InvalidArgumentError
from holdback.types import ModelInfo, SamplingParams, TraceContext
from holdback.v1 import inference_pb2, types_pb2

MODEL = ModelInfo(fingerprint="f", name="toy", vocab_size=512, eos_token_ids=(2,), max_model_len=256)
TOO_MANY = 1025


def generation(**fields: Any) -> inference_pb2.Generation:
    """A legal request; sampling fields are passed as `sampling_x=`."""
    sampling = {
        name.removeprefix("sampling_"): fields.pop(name) for name in list(fields) if name.startswith("sampling_")
    }
    message = inference_pb2.Generation(sampling=types_pb2.SamplingParams(**sampling), **fields)
    if message.WhichOneof("input") is None:
        message.text = "hi"
    return message


def chat(*messages: tuple[str, str]) -> inference_pb2.ChatMessages:
    return inference_pb2.ChatMessages(
        messages=[inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    )


def biases(*pairs: tuple[int, float]) -> list[types_pb2.LogitBias]:
    return [types_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in pairs]


@pytest.mark.case("B30", "B70")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_temperature": -0.1}, "sampling.temperature is -0.1; allowed: [0, 1000]"),
        ({"sampling_temperature": math.nan}, "sampling.temperature is nan; allowed: [0, 1000]"),
        ({"sampling_temperature": math.inf}, "sampling.temperature is inf; allowed: [0, 1000]"),
        ({"sampling_top_p": 1.5}, "sampling.top_p is 1.5; allowed: [0, 1]"),
        ({"sampling_top_p": -1.0}, "sampling.top_p is -1.0; allowed: [0, 1]"),
        ({"sampling_top_k": -2}, "sampling.top_k is -2; allowed: at least 1; 0 or -1 for all"),
        ({"sampling_min_p": 2.0}, "sampling.min_p is 2.0; allowed: [0, 1]"),
        ({"sampling_repetition_penalty": 0.0}, "sampling.repetition_penalty is 0.0; allowed: (0, 10]"),
        ({"sampling_presence_penalty": -2.5}, "sampling.presence_penalty is -2.5; allowed: [-2, 2]"),
        ({"sampling_frequency_penalty": 2.1}, "sampling.frequency_penalty is 2.1; allowed: [-2, 2]"),
        ({"sampling_num_logprobs": 21}, "sampling.num_logprobs is 21; allowed: [0, 20]"),
        ({"sampling_max_tokens": 0}, "sampling.max_tokens is 0; allowed: at least 1"),
        (
            {"sampling_stop_token_ids": range(TOO_MANY)},
            "sampling.stop_token_ids has 1025 entries; allowed: [0, 1024]",
        ),
        (
            {"sampling_allowed_token_ids": types_pb2.TokenIdSet()},
            "sampling.allowed_token_ids has 0 entries; allowed: [1, 1024]",
        ),
        (
            {"sampling_logit_bias": biases(*((i, 0.0) for i in range(TOO_MANY)))},
            "sampling.logit_bias has 1025 entries; allowed: [0, 1024]",
        ),
        (
            {"sampling_logit_bias": biases((3, 1e9))},
            "sampling.logit_bias[0].bias is 1000000000.0; allowed: [-100, 100]",
        ),
        (
            {"sampling_logit_bias": biases((3, 1.0), (4, 1.0), (3, 2.0))},
            "sampling.logit_bias[2].token_id is 3; allowed: at most one entry per token",
        ),
        ({"n": 0}, "n is 0; allowed: [1, 128]"),
        ({"n": 100_000}, "n is 100000; allowed: [1, 128]"),
        ({"request_id": "ü" * 129}, "request_id has 258 bytes; allowed: at most 256"),
        ({"request_id": "x" * 253, "n": 2}, "request_id has 253 bytes; allowed: at most 252"),
        ({"model": "x" * 257}, "model has 257 bytes; allowed: at most 256"),
        ({"cache_salt": "x" * 257}, "cache_salt has 257 bytes; allowed: at most 256"),
        ({"priority": 128}, "priority is 128; allowed: [-128, 127]"),
        ({"stop": ["x"] * 17}, "stop has 17 entries; allowed: [0, 16]"),
        ({"stop": ["x" * 1025]}, "stop[0] has 1025 bytes; allowed: at most 1024"),
        ({"text": "x" * (8 * 1024 * 1024 + 1)}, "text has 8388609 bytes; allowed: at most 8388608"),
        ({"chat": chat()}, "chat.messages has 0 messages; allowed: [1, 2048]"),
        ({"chat": chat(*[("user", "")] * 50_000)}, "chat.messages has 50000 messages; allowed: [1, 2048]"),
        ({"chat": chat(("user", ""), ("", ""))}, "chat.messages[1].role is ''; allowed: 1 to 64 bytes"),
        ({"chat": chat(("x" * 65, ""))}, "chat.messages[0].role has 65 bytes; allowed: at most 64"),
        (
            {"chat": chat(*[("user", "x" * 1_048_577)] * 8)},
            "chat.messages has 8388616 bytes; allowed: at most 8388608",
        ),
        ({"output_token_ids": [1], "n": 2}, "n is 2; allowed: 1, to resume from output_token_ids"),
        (
            {"output_token_ids": [1]},
            "sampling.seed is not set; allowed: the seed of the first message, to resume from output_token_ids",
        ),
    ],
)
def test_what_is_outside_its_limit_is_refused_with_field_value_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_generation(generation(**fields))
    error = caught.value
    assert error.message == message
    assert error.reason is ErrorReason.INVALID_FIELD
    assert message.startswith(error.field)
    assert error.value in message
    assert message.endswith(f"allowed: {error.limit}")


@pytest.mark.case("B40")
@pytest.mark.parametrize(("stop", "index"), [([""], 0), (["x", ""], 1)])
def test_an_empty_stop_string_is_refused(stop: list[str], index: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"stop\[{index}\] is ''; allowed: 1 to 1024 bytes"):
        check_generation(generation(stop=stop))


def test_a_request_without_any_input_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="input is not set; allowed: one of text, chat"):
        check_generation(inference_pb2.Generation())


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling_temperature": 1000.0, "sampling_top_p": 0.0, "sampling_min_p": 1.0, "sampling_num_logprobs": 20},
        {"sampling_repetition_penalty": 10.0, "sampling_presence_penalty": -2.0, "sampling_frequency_penalty": 2.0},
        {"sampling_max_tokens": 1, "sampling_seed": -(2**63), "n": 128, "stop": ["x" * 1024] * 16, "priority": -128},
        {"request_id": "x" * 256, "cache_salt": "x" * 256, "sampling_logit_bias": biases((0, -100.0), (1, 100.0))},
        {"chat": chat(*[("x" * 64, "")] * 2048)},
        {"token_ids": inference_pb2.TokenIds()},
    ],
)
def test_the_limits_themselves_are_allowed(fields: dict[str, Any]) -> None:
    check_generation(generation(**fields))


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_of_zero_or_minus_one_keeps_all(top_k: int) -> None:
    assert check_generation(generation(sampling_top_k=top_k)).sampling.top_k is None


def test_what_a_request_leaves_open_is_known_as_such() -> None:
    checked = check_generation(generation())
    assert checked.sampling == SamplingParams()
    assert (checked.seed_given, checked.max_tokens_given, checked.n, checked.stop) == (False, False, 1, ())
    given = check_generation(generation(sampling_seed=0, sampling_max_tokens=5))
    assert (given.seed_given, given.max_tokens_given) == (True, True)


def refused(num_prompt_tokens: int = 4, default_max_tokens: int = 64, **fields: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        check_generation(generation(**fields)).fit([1] * num_prompt_tokens, MODEL, default_max_tokens)
    return caught.value


@pytest.mark.case("B50")
def test_a_prompt_of_no_tokens_is_refused() -> None:
    error = refused(num_prompt_tokens=0)
    assert error.reason is ErrorReason.PROMPT_EMPTY
    assert error.message == "prompt has 0 tokens; allowed: [1, 255], for max_model_len is 256"


@pytest.mark.case("B10")
@pytest.mark.parametrize("num_prompt_tokens", [256, 257])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(num_prompt_tokens: int) -> None:
    error = refused(num_prompt_tokens=num_prompt_tokens)
    assert error.reason is ErrorReason.PROMPT_TOO_LONG
    assert error.message == f"prompt has {num_prompt_tokens} tokens; allowed: [1, 255], for max_model_len is 256"


@pytest.mark.case("B10")
@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "default_max_tokens", "expected"),
    [(255, None, 64, 1), (250, 100, 64, 6), (4, None, 64, 64), (4, None, 0, 252), (4, 5, 64, 5)],
)
def test_max_tokens_is_cut_to_what_fits(
    num_prompt_tokens: int, max_tokens: int | None, default_max_tokens: int, expected: int
) -> None:
    checked = check_generation(generation(sampling_max_tokens=max_tokens))
    assert checked.fit([1] * num_prompt_tokens, MODEL, default_max_tokens).max_tokens == expected


@pytest.mark.case("B35")
@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling_stop_token_ids": [5, 512]}, "sampling.stop_token_ids[1]"),
        ({"sampling_logit_bias": biases((512, 5.0))}, "sampling.logit_bias[0]"),
        ({"sampling_allowed_token_ids": types_pb2.TokenIdSet(token_ids=[512])}, "sampling.allowed_token_ids[0]"),
        ({"output_token_ids": [1, 512], "sampling_seed": 1}, "output_token_ids[1]"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_with_their_index(fields: dict[str, Any], field: str) -> None:
    error = refused(**fields)
    assert error.reason is ErrorReason.TOKEN_OUT_OF_VOCABULARY
    assert error.message == f"{field} is 512; allowed: [0, 512)"


@pytest.mark.case("B35")
def test_a_prompt_with_an_id_outside_the_vocabulary_is_refused_with_its_index() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^token_ids\[2\] is 4294967295; allowed: \[0, 512\)$"):
        check_generation(generation()).fit([1, 511, 2**32 - 1, 512], MODEL, 64)


def test_min_tokens_beyond_max_tokens_is_refused_and_is_cut_with_it() -> None:
    assert refused(sampling_min_tokens=11, sampling_max_tokens=10).message == (
        "sampling.min_tokens is 11; allowed: at most max_tokens, which is 10"
    )
    assert refused(sampling_min_tokens=65).limit == "at most max_tokens, which is 64"
    cut = check_generation(generation(sampling_min_tokens=8, sampling_max_tokens=10)).fit([1] * 250, MODEL, 64)
    assert (cut.min_tokens, cut.max_tokens) == (6, 6)


def test_more_outputs_than_may_come_cannot_be_resumed_from() -> None:
    error = refused(output_token_ids=[1] * 6, sampling_seed=1, sampling_max_tokens=5)
    assert error.message == "output_token_ids has 6 tokens; allowed: at most 5"


def test_a_model_of_one_prompt_token_and_one_output_serves_just_that() -> None:
    tiny = dataclasses.replace(MODEL, max_model_len=2)
    assert check_generation(generation()).fit([1], tiny, 64).max_tokens == 1


def test_a_trace_header_that_the_scheduler_would_refuse_is_left_out() -> None:
    longest = "p" * 512
    assert trace_context(longest, "\u00fc" * 256) == TraceContext(longest, "\u00fc" * 256)
    assert trace_context(longest + "p", "\u00fc" * 257) == TraceContext("", "")
