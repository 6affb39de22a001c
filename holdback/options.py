"""What a request may ask for, and how it is put into a message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtobufMessage

from holdback.errors import InvalidArgumentError
from holdback.v1 import inference_pb2, types_pb2

Message = Mapping[str, str]
"""One message of a conversation: `{"role": ..., "content": ...}`."""


class ChatOptions(TypedDict, total=False):
    """Options of a generation, whatever it goes on from. An option that is None is as one that is not given.

    Attributes:
        model: a served model or an alias; not given: the only one.
        request_id: at most 256 bytes, for `abort`; not given: the gateway makes one.
        n: independent choices, in [1, 128]; 1 by default.
        stop: a string, or at most 16 of them, that end a choice and are left out of its text.
        keep_special_tokens: special tokens appear in the text; False by default.
        echo: the text starts with the prompt; False by default.
        priority: in [-128, 127], 0 by default; lower is served first where the pool's policy is `priority`.
        cache_salt: at most 256 bytes; cached blocks are shared between requests of equal salt only.
        output_token_ids: outputs received before a stream broke, to go on after them, which the streams of a client do
            by themselves; needs its `seed`, and `n` 1. What follows equals what was lost where logits are bit-equal. In
            bfloat16 they are nearly so, since these outputs are computed as a prompt: with a temperature above 0, and
            rarely with 0, other tokens can follow.
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


class GenerateOptions(ChatOptions, total=False):
    """Options of `AsyncClient.generate` and `stream`: those of `ChatOptions`, and what to go on from.

    Attributes:
        messages: a conversation instead of a prompt, each message a mapping of `role` and `content`.
        token_ids: a prompt as token ids instead of text.
    """

    messages: Sequence[Message] | None
    token_ids: Sequence[int] | None


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
            set_field(message, name, given[name])
    stop = given.get("stop", ())
    set_field(message, "stop", (stop,) if isinstance(stop, str) else stop)
    set_field(message, "output_token_ids", given.get("output_token_ids", ()))
    sampling = _encode_sampling(given)
    if sampling.ListFields():
        message.sampling.CopyFrom(sampling)
    return message


def _encode_input(message: inference_pb2.Generation, prompt: str | None, given: Mapping[str, Any]) -> None:
    if prompt is not None:
        set_field(message, "text", prompt, "prompt")
    if "messages" in given:
        refuse_second_input(message.WhichOneof("input"))
        message.chat.CopyFrom(encode_messages(given["messages"]))
    if "token_ids" in given:
        refuse_second_input(message.WhichOneof("input"))
        message.token_ids.SetInParent()
        set_field(message.token_ids, "token_ids", given["token_ids"])


def refuse_second_input(first: str | None) -> None:
    """Raises InvalidArgumentError when a request has an input already."""
    if first is not None:
        raise InvalidArgumentError.of("input", "more than one of prompt, messages and token_ids", "exactly one")


def encode_messages(messages: Sequence[Message]) -> inference_pb2.ChatMessages:
    """Raises InvalidArgumentError for anything but mappings of exactly `role` and `content` to text."""
    chat = inference_pb2.ChatMessages()
    if isinstance(messages, str) or not isinstance(messages, Iterable):
        raise InvalidArgumentError.of("messages", messages, "a list of mappings of `role` and `content` to text")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            raise InvalidArgumentError.of(f"messages[{index}]", message, "a mapping of `role` and `content` to text")
        entry = chat.messages.add()
        for name, value in message.items():
            set_field(entry, name, value, f"messages[{index}].{name}")
    return chat


def _encode_sampling(given: Mapping[str, Any]) -> types_pb2.SamplingParams:
    message = types_pb2.SamplingParams()
    for name in _SAMPLING:
        if name in given:
            set_field(message, name, given[name], f"sampling.{name}")
    set_field(message, "stop_token_ids", given.get("stop_token_ids", ()), "sampling.stop_token_ids")
    if "allowed_token_ids" in given:
        message.allowed_token_ids.SetInParent()
        set_field(message.allowed_token_ids, "token_ids", given["allowed_token_ids"], "sampling.allowed_token_ids")
    biases = given.get("logit_bias", {})
    if not isinstance(biases, Mapping):
        raise InvalidArgumentError.of("sampling.logit_bias", biases, "a mapping of token ids to numbers")
    for token_id, bias in biases.items():
        entry = message.logit_bias.add()
        set_field(entry, "token_id", token_id, "sampling.logit_bias")
        set_field(entry, "bias", bias, f"sampling.logit_bias[{token_id}]")
    return message


_HOLDS = {
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_INT32: f"an integer in [{-(2**31)}, {2**31 - 1}]",
    FieldDescriptor.TYPE_INT64: f"an integer in [{-(2**63)}, {2**63 - 1}]",
    FieldDescriptor.TYPE_SINT32: f"an integer in [{-(2**31)}, {2**31 - 1}]",
    FieldDescriptor.TYPE_STRING: "text",
    FieldDescriptor.TYPE_UINT32: f"an integer in [0, {2**32 - 1}]",
}


def set_field(message: ProtobufMessage, name: str, value: Any, label: str | None = None) -> None:
    """Puts a value, or the values of a list, into a field of a message.

    Args:
        label: what the caller knows the field by; its name if None.

    Raises:
        InvalidArgumentError: the field cannot hold it: -1 in an unsigned one, a number for text.
    """
    field = message.DESCRIPTOR.fields_by_name[name]
    try:
        if field.is_repeated:
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError):
        holds = _HOLDS[field.type]
        limit = f"a list, each {holds}" if field.is_repeated else holds
        raise InvalidArgumentError.of(label or name, value, limit) from None
