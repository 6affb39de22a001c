"""Fields of HTTP requests: what they become, and how each that is wrong is refused by its own name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits import MAX_MESSAGES, MAX_STOP_STRINGS, check_generation
from gateway.openai.chat import ChatCompletionRequest
from gateway.openai.completion import MAX_CHOICES, CompletionRequest
from gateway.openai.errors import KINDS, error_object
from gateway.openai.fields import GenerationRequest
from holdback.errors import (
    ErrorReason,
    HoldbackError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from holdback.request_limits import MAX_TOKEN_ID_LIST
from holdback.v1 import inference_pb2, types_pb2

HI = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.read({"prompt": "x"} | fields)


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.read({"messages": HI} | fields)


def subclasses(cls: type[Any]) -> set[type[Any]]:
    return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))


def test_every_exception_of_the_package_has_a_status_and_a_type() -> None:
    own = {cls for cls in subclasses(HoldbackError) - {HoldbackError} if cls.__module__ == HoldbackError.__module__}
    assert set(KINDS) == own


def test_errors_have_openais_codes_where_it_has_one() -> None:
    long = InvalidArgumentError("prompt is long", field="prompt", reason=ErrorReason.PROMPT_TOO_LONG)
    assert error_object(long) == {
        "message": "prompt is long",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }
    assert error_object(NotFoundError("none"))["param"] == "model"
    assert error_object(ResourceExhaustedError("full"))["code"] == "queue_full"


def test_nothing_but_a_prompt_leaves_everything_else_open() -> None:
    (message,) = completion().generations()
    sampling = types_pb2.SamplingParams(max_tokens=16)
    assert message == inference_pb2.Generation(text="x", sampling=sampling, keep_special_tokens=False, echo=False)
    (message,) = chat().generations()
    assert not message.sampling.HasField("max_tokens")


def test_every_field_reaches_the_message() -> None:
    fields = {
        "model": "toy",
        "n": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.25,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.25,
        "seed": -5,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "allowed_token_ids": [1, 3],
        "logit_bias": {"3": -100, "17": 2.5},
        "max_tokens": 9,
        "min_tokens": 4,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "priority": -3,
        "cache_salt": "s",
        "logprobs": 4,
    }
    (message,) = completion(**fields).generations()
    assert message == inference_pb2.Generation(
        text="x",
        model="toy",
        n=2,
        stop=["a", "b"],
        keep_special_tokens=True,
        echo=False,
        priority=-3,
        cache_salt="s",
        sampling=types_pb2.SamplingParams(
            temperature=0,
            top_p=0.5,
            top_k=7,
            min_p=0.25,
            presence_penalty=-1,
            frequency_penalty=1.5,
            repetition_penalty=1.25,
            seed=-5,
            stop_token_ids=[3],
            allowed_token_ids=types_pb2.TokenIdSet(token_ids=[1, 3]),
            logit_bias=[types_pb2.LogitBias(token_id=3, bias=-100), types_pb2.LogitBias(token_id=17, bias=2.5)],
            max_tokens=9,
            min_tokens=4,
            ignore_eos=True,
            num_logprobs=4,
        ),
    )


def test_null_is_the_default_of_every_field() -> None:
    for kind, required in ((CompletionRequest, {"prompt": "x"}), (ChatCompletionRequest, {"messages": HI})):
        names = (*kind.model_fields, *kind.unsupported)
        nothing = {name: None for name in names if name not in required}
        assert kind.read(required | nothing).generations() == kind.read(required).generations()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([5, 0], [[5, 0]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a", [5]], ["a", [5]]),
        ([[]], [[]]),
    ],
)
def test_prompts_are_texts_or_token_ids_one_or_several(prompt: Any, expected: list[Any]) -> None:
    messages = completion(prompt=prompt).generations()
    assert [
        message.text if message.HasField("text") else list(message.token_ids.token_ids) for message in messages
    ] == (expected)


def test_text_parts_are_lines_and_a_developer_is_the_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    (message,) = chat(messages=[{"role": "developer", "content": parts}, HI[0]]).generations()
    assert [(entry.role, entry.content) for entry in message.chat.messages] == [("system", "one\ntwo"), ("user", "hi")]


def test_a_message_of_an_answer_can_be_sent_back_as_it_came() -> None:
    sent: dict[str, Any] = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "tool_calls": [],
        "annotations": [],
        "audio": None,
    }
    (message,) = chat(messages=[*HI, sent]).generations()
    assert message.chat.messages[1].content == "yes"


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 6, "max_completion_tokens": 6}, 6),
    ],
)
def test_both_names_of_the_token_limit_count(fields: dict[str, int], limit: int) -> None:
    (message,) = chat(**fields).generations()
    assert message.sampling.max_tokens == limit


@pytest.mark.parametrize(
    ("fields", "num_logprobs"),
    [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)
def test_top_logprobs_need_logprobs(fields: dict[str, Any], num_logprobs: int | None) -> None:
    assert chat(**fields).num_logprobs == num_logprobs


@pytest.mark.case("B30", "B35", "B40", "B46", "B70")
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temperature": -0.1}, "temperature", "temperature is -0.1; allowed: at least 0"),
        ({"temperature": 999999}, "temperature", "at most 1000"),
        ({"temperature": float("inf")}, "temperature", "at most 1000"),
        ({"temperature": "1"}, "temperature", "temperature is '1'; allowed: a number"),
        ({"temperature": True}, "temperature", "temperature is true; allowed: a number"),
        ({"top_p": -1}, "top_p", "at least 0"),
        ({"top_p": 1.5}, "top_p", "at most 1"),
        ({"top_k": -2}, "top_k", "at least -1"),
        ({"top_k": 2**40}, "top_k", "at most"),
        ({"repetition_penalty": 0}, "repetition_penalty", "above 0"),
        ({"min_p": 2}, "min_p", "at most 1"),
        ({"n": 0}, "n", "n is 0; allowed: at least 1"),
        ({"n": 100_000}, "n", "at most 128"),
        ({"n": 1.0}, "n", "a whole number"),
        ({"max_tokens": -1}, "max_tokens", "at least 1"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"seed": 2**70}, "seed", "at most 9223372036854775807"),
        ({"priority": 200}, "priority", "at most 127"),
        ({"stop": ""}, "stop", "stop is ''; allowed: a string of 1 to 1024 bytes"),
        ({"stop": [""]}, "stop[0]", "1 to 1024"),
        ({"stop": ["x", ""]}, "stop[1]", "1 to 1024"),
        ({"stop": [5]}, "stop[0]", "stop[0] is 5"),
        ({"stop": ["x"] * 500_000}, "stop", f"an array of 500000; allowed: at most {MAX_STOP_STRINGS} strings"),
        ({"logit_bias": {"-1": 5}}, "logit_bias", "logit_bias is '-1'; allowed: token ids as keys"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias is 'x'"),
        ({"logit_bias": {"03": 1}}, "logit_bias", "logit_bias is '03'"),
        ({"logit_bias": {"5\n": 1}}, "logit_bias", "token ids as keys"),
        ({"logit_bias": {"3": 1e9}}, "logit_bias.3", "a number in [-100, 100]"),
        ({"logit_bias": {"3": None}}, "logit_bias.3", "logit_bias.3 is null"),
        ({"logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias", f"at most {MAX_TOKEN_ID_LIST}"),
        ({"stop_token_ids": [1, -2]}, "stop_token_ids[1]", "at least 0"),
        ({"stop_token_ids": [1] * 2000}, "stop_token_ids", "at most 1024 entries"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least 1 entries"),
        ({"model": 5}, "model", "a string of at most 256 bytes"),
        ({"model": "m" * 300}, "model", "at most 256 bytes"),
        ({"user": "u" * 2000}, "user", "at most 512 characters"),
        ({"metadata": {"a": 5}}, "metadata.a", "a string"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "null, unless stream is true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "not known"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"frequency": 1}, "frequency", "frequency is not known"),
    ],
)
def test_a_wrong_field_is_refused_by_name_value_and_limit(fields: dict[str, Any], param: str, words: str) -> None:
    for read in (completion, chat):
        with pytest.raises(InvalidArgumentError) as caught:
            read(**fields)
        assert caught.value.field == param
        assert words in caught.value.message
        assert len(caught.value.message) < 300


@pytest.mark.case("B35", "B50", "B70")
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": None}, "prompt", "prompt is null"),
        ({"prompt": []}, "prompt", "an array of 0"),
        ({"prompt": 5}, "prompt", "prompt is 5"),
        ({"prompt": [-1]}, "prompt[0]", "prompt[0] is -1"),
        ({"prompt": [1, True]}, "prompt[1]", "prompt[1] is true"),
        ({"prompt": [1, 2**40]}, "prompt[1]", "token ids"),
        ({"prompt": [1, "a"]}, "prompt[1]", "prompt[1] is 'a'"),
        ({"prompt": ["a", 5]}, "prompt[1]", "a string or token ids"),
        ({"prompt": [[1], [2, 0.5]]}, "prompt[1][1]", "is 0.5"),
        ({"prompt": ["a"] * 100_000}, "prompt", f"at most {MAX_CHOICES} prompts"),
        ({"prompt": ["a"] * 10, "n": 100}, "n", "here 1000"),
        ({"echo": True, "logprobs": 1}, "echo", "not supported"),
        ({"logprobs": True}, "logprobs", "a whole number"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"best_of": 2}, "best_of", "null or 1, for this is not supported"),
        ({"best_of": True}, "best_of", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"prompt": ["a", "b"], "output_token_ids": [1]}, "output_token_ids", "only with one prompt"),
        ({"messages": HI}, "messages", "not known"),
    ],
)
def test_what_only_completions_have_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        completion(**fields)
    assert caught.value.field == param
    assert words in caught.value.message


def test_a_request_without_its_input_says_so() -> None:
    for kind, name in ((CompletionRequest, "prompt"), (ChatCompletionRequest, "messages")):
        with pytest.raises(InvalidArgumentError, match=f"^{name} is required$"):
            kind.read({})


@pytest.mark.case("B51", "B70", "B72", "B74", "B75")
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "an array of 0"),
        ({"messages": HI * 50_000}, "messages", f"an array of 50000; allowed: an array of 1 to {MAX_MESSAGES}"),
        ({"messages": ["hi"]}, "messages[0]", "an object with role and content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "messages[0].role is 'tool'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is null"),
        ({"messages": [*HI, {"role": "assistant", "content": None}]}, "messages[1].content", "is null"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is null"),
        ({"messages": [{"role": "assistant"}, *HI]}, "messages[0].content", "is null"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "an array of 0"),
        ({"messages": [HI[0] | {"name": "Bob"}]}, "messages[0].name", "not supported"),
        ({"messages": [HI[0] | {"tool_calls": [{}]}]}, "messages[0].tool_calls", "not supported"),
        ({"messages": [HI[0] | {"weight": 1}]}, "messages[0].weight", "no such field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0].type",
            "is 'image_url'; allowed: 'text'; images, audio and files are not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0].type", "'file'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "a string"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "an object"),
        ({"top_logprobs": 2}, "top_logprobs", "unless logprobs is true"),
        ({"logprobs": True, "top_logprobs": 100_000}, "top_logprobs", "at most 20"),
        ({"logprobs": 2}, "logprobs", "true or false"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "max_completion_tokens (3)"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"tools": [{"type": "function"}]}, "tools", "null or [], for this is not supported"),
        ({"tool_choice": "auto"}, "tool_choice", "not supported"),
        ({"functions": [{}]}, "functions", "not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "not supported"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"chat_template": "{{ ''.__class__ }}"}, "chat_template", "not supported"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "not supported"),
        ({"store": True}, "store", "not supported"),
        ({"echo": True}, "echo", "not supported"),
        ({"prompt": "x"}, "prompt", "not known"),
    ],
)
def test_what_only_chat_has_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        chat(**fields)
    assert caught.value.field == param
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.min_tokens", "min_tokens"),
        ("sampling.max_tokens", "max_completion_tokens"),
        ("sampling.num_logprobs", "logprobs"),
        ("sampling.logit_bias[1]", "logit_bias.512"),
        ("sampling.stop_token_ids[0]", "stop_token_ids[0]"),
        ("chat.messages[2].role", "messages[2].role"),
        ("prompt", "messages"),
        ("stop[1]", "stop[1]"),
    ],
)
def test_errors_of_the_shared_checks_name_the_field_as_the_client_has_it(field: str, param: str) -> None:
    request = chat(logit_bias={"3": 1, "512": 1}, max_completion_tokens=4)
    error = request.client_error(InvalidArgumentError.of(field, 5, "less"), "messages")
    assert (error.field, error.message) == (param, f"{param} is 5; allowed: less")


NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([2**31, 2**32, 2**63, -(2**63), 2**64]),
    st.floats(allow_nan=False),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text("019-x", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_is_sent_is_a_request_or_a_refusal_by_name(kind: type[GenerationRequest], data: st.DataObject) -> None:
    names = st.sampled_from([*kind.model_fields, *kind.unsupported, "unknown"])
    required: dict[str, Any] = {"prompt": "x"} if kind is CompletionRequest else {"messages": HI}
    error = refusal(kind, required | data.draw(st.dictionaries(names, VALUES, max_size=4)))
    if error is not None:
        assert error.field.split(".")[0].split("[")[0] in (*kind.model_fields, *kind.unsupported, "unknown")
        assert error.message.startswith(error.field)
        assert len(error.message) < 400


def refusal(kind: type[GenerationRequest], body: dict[str, Any]) -> InvalidArgumentError | None:
    """What is wrong with a request as far as it can be told without a model."""
    try:
        request = kind.read(body)
    except InvalidArgumentError as error:
        return error
    for name, message in zip(request.input_names, request.generations(), strict=True):
        try:
            check_generation(message)
        except InvalidArgumentError as error:
            return request.client_error(error, name)
    return None
