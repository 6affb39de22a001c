"""What a request may ask for, and how it is put into a message."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from holdback.errors import InvalidArgumentError
from holdback.v1 import inference_pb2, types_pb2

Message = Mapping[str, str]
"""One message of a conversation: `{"role": ..., "content": ...}`."""


class GenerateOptions(TypedDict, total=False):
    """Options of `AsyncClient.generate` and `stream`. An option that is None is as one that is not given.

    Attributes:
        messages: a conversation instead of a prompt, each message a mapping of `role` and `content`.
        token_ids: a prompt as token ids instead of text.
        model: a served model or an alias; not given: the only one.
        request_id: at most 256 bytes, for `abort`; not given: the gateway makes one.
        n: independent choices, in [1, 128]; 1 by default.
        stop: a string, or at most 16 of them, that end a choice and are left out of its text.
        keep_special_tokens: special tokens appear in the text; False by default.
        echo: the text starts with the prompt; False by default.
        priority: in [-128, 127], 0 by default; lower is served first where the pool's policy is `priority`.
        cache_salt: at most 256 bytes; cached blocks are shared between requests of equal salt only.
        output_token_ids: outputs received before a stream broke, to go on after them; needs its `seed`, and `n` 1.
        temperature: in [0, 1000], 1 by default; 0 is greedy.
        top_k: keep the k most likely tokens, >= 1; 0 and -1 keep all, which is the default.
        top_p: in [0, 1], 1 by default; 0 keeps exactly the most likely token.
        min_p: in [0, 1], 0 by default.
        repetition_penalty: in (0, 10], 1 by default; counts prompt and output.
        presence_penalty: in [-2, 2], 0 by default; counts outputs.
        frequency_penalty: in [-2, 2], 0 by default; counts outputs.
        seed: signed 64 bit; not given: the gateway draws one and tells it.
        max_tokens: at least 1; not given: the pool's `default_max_tokens`. Cut to what fits.
        min_tokens: in [0, max_tokens], 0 by default; EOS and stop tokens are not sampled before.
        ignore_eos: EOS does not end a choice; False by default.
        stop_token_ids: at most 1,024 tokens that end a choice besides EOS.
        allowed_token_ids: at most 1,024 tokens, the only ones that may be sampled; not given: all.
        logit_bias: at most 1,024 tokens and what is added to their logits, in [-100, 100].
        num_logprobs: in [0, 20]; log-probabilities of the chosen and of this many most likely tokens.
    """

    messages: Sequence[Message] | None
    token_ids: Sequence[int] | None
    model: str | None
    request_id: str | None
    n: int | None
    stop: str | Sequence[str] | None
    keep_special_tokens: bool | None
    echo: bool | None
    priority: int | None
    cache_salt: str | None
    output_token_ids: Sequence[int] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop_token_ids: Sequence[int] | None
    allowed_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    num_logprobs: int | None


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "num_logprobs",
)
_SCALARS = ("model", "request_id", "n", "keep_special_tokens", "echo", "priority", "cache_salt")


def encode_generation(prompt: str | None, options: GenerateOptions) -> inference_pb2.Generation:
    """The message of a request. Raises InvalidArgumentError for a value that its field cannot hold."""
    given = {name: value for name, value in options.items() if value is not None}
    unknown = given.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    message = inference_pb2.Generation()
    _encode_input(message, prompt, given)
    for name in _SCALARS:
        if name in given:
            set_field(name, given[name], functools.partial(setattr, message, name))
    stop = given.get("stop", ())
    set_field("stop", (stop,) if isinstance(stop, str) else stop, message.stop.extend)
    set_field("output_token_ids", given.get("output_token_ids", ()), message.output_token_ids.extend)
    sampling = _encode_sampling(given)
    if sampling.ListFields():
        message.sampling.CopyFrom(sampling)
    return message


def _encode_input(message: inference_pb2.Generation, prompt: str | None, given: Mapping[str, Any]) -> None:
    if prompt is not None:
        set_field("prompt", prompt, functools.partial(setattr, message, "text"))
    if "messages" in given:
        refuse_second_input(message.WhichOneof("input"))
        message.chat.CopyFrom(encode_messages(given["messages"]))
    if "token_ids" in given:
        refuse_second_input(message.WhichOneof("input"))
        message.token_ids.SetInParent()
        set_field("token_ids", given["token_ids"], message.token_ids.token_ids.extend)


def refuse_second_input(first: str | None) -> None:
    """Raises InvalidArgumentError when a request has an input already."""
    if first is not None:
        raise InvalidArgumentError.of("input", "more than one of prompt, messages and token_ids", "exactly one")


def encode_messages(messages: Sequence[Message]) -> inference_pb2.ChatMessages:
    """Raises InvalidArgumentError for a message that is not a mapping of `role` and `content` to text."""
    chat = inference_pb2.ChatMessages()
    for index, message in enumerate(messages):
        set_field(f"messages[{index}]", message, lambda fields: chat.messages.add(**fields))
    return chat


def _encode_sampling(given: Mapping[str, Any]) -> types_pb2.SamplingParams:
    message = types_pb2.SamplingParams()
    for name in _SAMPLING:
        if name in given:
            set_field(f"sampling.{name}", given[name], functools.partial(setattr, message, name))
    set_field("sampling.stop_token_ids", given.get("stop_token_ids", ()), message.stop_token_ids.extend)
    if "allowed_token_ids" in given:
        message.allowed_token_ids.SetInParent()
        set_field("sampling.allowed_token_ids", given["allowed_token_ids"], message.allowed_token_ids.token_ids.extend)
    for token_id, bias in given.get("logit_bias", {}).items():
        entry = {"token_id": token_id, "bias": bias}
        set_field("sampling.logit_bias", entry, lambda fields: message.logit_bias.add(**fields))
    return message


def set_field(field: str, value: Any, setter: Callable[[Any], object]) -> None:
    """Puts a value into a message, which refuses one that its field cannot hold: -1 in an unsigned one, text."""
    try:
        setter(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError.of(field, value, f"what the field can hold ({error})") from None
