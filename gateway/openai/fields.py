"""The fields that both endpoints have: types, bounds, and the way to a message that every protocol shares.

Bounds come from `gateway.limits` and `holdback.request_limits`, so that they are the same on every protocol, and stand
in the OpenAPI document.
Values are taken as they are: a number in quotes is no number, and 1.0 no whole one. What is checked with the model,
such as the length of a prompt, is told in the names of this protocol by `client_error`.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import pydantic
from pydantic import Field, PlainValidator, StrictStr, WithJsonSchema

from gateway.limits import (
    MAX_MODEL_NAME_BYTES,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_TOKEN_IDS,
    N_RANGE,
    PRIORITY_RANGE,
)
from gateway.openai.wording import check_asks_for_nothing, from_pydantic, shorten, unknown, wrong
from holdback.errors import InvalidArgumentError
from holdback.request_limits import (
    BIAS_RANGE,
    MAX_CACHE_SALT_BYTES,
    MAX_REQUEST_ID_BYTES,
    MAX_TOKEN_ID_LIST,
    RANGES,
    Range,
)
from holdback.v1 import inference_pb2, types_pb2

MAX_USER_CHARS = 512
MAX_METADATA = 16
MAX_UINT32 = 2**32 - 1
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bad_words": (None, []),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "logits_processors": (None, []),
    "prompt_logprobs": (None,),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "service_tier": (None, "auto", "default"),
    "spaces_between_special_tokens": (None, True),
    "structured_outputs": (None,),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}
"""Fields that OpenAI or vLLM have at both endpoints and Holdback has not, with the values that ask for nothing."""

_TOKEN_KEY = re.compile(r"(0|[1-9][0-9]{0,9})\Z")


def bounds(allowed: Range) -> Any:
    """A number field within a range of these."""
    if allowed.excludes_low:
        return Field(gt=allowed.low, le=allowed.high)
    return Field(ge=allowed.low, le=allowed.high)


def _stop(value: Any) -> tuple[str, ...]:
    """One string is a list of one."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list):
        raise wrong("stop", value, f"a string or at most {MAX_STOP_STRINGS} strings")
    if len(entries) > MAX_STOP_STRINGS:
        raise wrong("stop", entries, f"at most {MAX_STOP_STRINGS} strings")
    for index, entry in enumerate(entries):
        if not isinstance(entry, str) or not 1 <= len(entry.encode()) <= MAX_STOP_STRING_BYTES:
            name = "stop" if entry is value else f"stop[{index}]"
            raise wrong(name, entry, f"a string of 1 to {MAX_STOP_STRING_BYTES} bytes")
    return tuple(entries)


def _logit_bias(value: Any) -> dict[int, float]:
    """Token ids are the keys of an object, so they are strings."""
    if not isinstance(value, dict) or len(value) > MAX_TOKEN_ID_LIST:
        raise wrong("logit_bias", value, f"an object of at most {MAX_TOKEN_ID_LIST} token ids with their biases")
    for key, bias in value.items():
        if _TOKEN_KEY.match(key) is None or int(key) > MAX_UINT32:
            raise wrong("logit_bias", key, "token ids as keys, in decimal digits")
        if type(bias) not in (int, float) or bias not in BIAS_RANGE:
            raise wrong(f"logit_bias.{key}", bias, f"a number in {BIAS_RANGE}")
    return {int(key): bias for key, bias in value.items()}


def _sized_text(name: str, limit: int) -> Any:
    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value.encode()) > limit:
            raise wrong(name, value, f"a string of at most {limit} bytes")
        return value

    return Annotated[str, PlainValidator(check), WithJsonSchema({"type": "string", "maxLength": limit})]


_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_BYTES}
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_stop),
    WithJsonSchema({"anyOf": [_STOP_STRING, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP_STRING}]}),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_TOKEN_ID_LIST,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {"type": "number", "minimum": BIAS_RANGE.low, "maximum": BIAS_RANGE.high},
        }
    ),
]
TokenId = Annotated[int, Field(ge=0, le=MAX_UINT32)]


class StreamOptions(pydantic.BaseModel):
    """How a stream is written."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = Field(None, description="one more chunk at the end, with the usage and no choices")


class GenerationRequest(pydantic.BaseModel):
    """What both endpoints take. `null` is the default of every field."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]]
    """As `UNSUPPORTED`, of one endpoint."""

    model: _sized_text("model", MAX_MODEL_NAME_BYTES) | None = Field(  # type: ignore[valid-type]
        None, description="a served model; may be left out where there is only one"
    )
    stream: bool | None = Field(None, description="answer with server-sent events, ended by `data: [DONE]`")
    stream_options: StreamOptions | None = None
    n: Annotated[int, bounds(N_RANGE)] | None = Field(None, description="choices for each prompt; default 1")
    temperature: Annotated[float, bounds(RANGES["temperature"])] | None = Field(None, description="0 is greedy")
    top_p: Annotated[float, bounds(RANGES["top_p"])] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(None, description="0 and -1 keep all tokens")
    min_p: Annotated[float, bounds(RANGES["min_p"])] | None = None
    presence_penalty: Annotated[float, bounds(RANGES["presence_penalty"])] | None = None
    frequency_penalty: Annotated[float, bounds(RANGES["frequency_penalty"])] | None = None
    repetition_penalty: Annotated[float, bounds(RANGES["repetition_penalty"])] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_ID_LIST)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_ID_LIST)] | None = None
    logit_bias: LogitBias | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_UINT32)] | None = Field(None, description="at most max_tokens")
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="default true")
    priority: Annotated[int, bounds(PRIORITY_RANGE)] | None = Field(None, description="lower is served first")
    cache_salt: _sized_text("cache_salt", MAX_CACHE_SALT_BYTES) | None = None  # type: ignore[valid-type]
    output_token_ids: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)] | None = Field(
        None, description="outputs of a stream that broke, to resume it; needs `seed` and one choice"
    )
    request_id: _sized_text("request_id", MAX_REQUEST_ID_BYTES) | None = Field(  # type: ignore[valid-type]
        None, description="goes to the log; the gateway makes the id"
    )
    user: Annotated[StrictStr, Field(max_length=MAX_USER_CHARS)] | None = Field(None, description="ignored")
    safety_identifier: Annotated[StrictStr, Field(max_length=MAX_USER_CHARS)] | None = Field(
        None, description="ignored"
    )
    prompt_cache_key: Annotated[StrictStr, Field(max_length=MAX_USER_CHARS)] | None = Field(None, description="ignored")
    metadata: Annotated[dict[str, StrictStr], Field(max_length=MAX_METADATA)] | None = Field(
        None, description="ignored"
    )

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """The request in a JSON object. Raises InvalidArgumentError."""
        supported = {}
        for name, value in body.items():
            if name in cls.unsupported:
                check_asks_for_nothing(name, value, cls.unsupported[name])
            elif name in cls.model_fields:
                supported[name] = value
            else:  # at the first, for pydantic would tell of each
                raise unknown(shorten(name), value)
        try:
            request = cls.model_validate(supported)
        except pydantic.ValidationError as error:
            raise from_pydantic(error) from None
        request.check()
        return request

    def check(self) -> None:
        """What no field says alone. Raises InvalidArgumentError."""
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", {}, "null, unless stream is true")

    @property
    @abc.abstractmethod
    def num_logprobs(self) -> int | None:
        """Most likely tokens to tell with each token; None without log-probabilities."""

    @property
    @abc.abstractmethod
    def input_names(self) -> list[str]:
        """What the client calls each of the prompts."""

    @abc.abstractmethod
    def generations(self) -> list[inference_pb2.Generation]:
        """One message for each prompt. Ids are left to the gateway."""

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """Most output tokens, and the name of the field that said it."""
        return "max_tokens", self.max_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def generation(self) -> inference_pb2.Generation:
        """A message with everything but the input."""
        return inference_pb2.Generation(
            model=self.model or "",
            sampling=self._sampling(),
            n=self.n,
            stop=self.stop or (),
            keep_special_tokens=self.skip_special_tokens is False,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            output_token_ids=self.output_token_ids or (),
        )

    def _sampling(self) -> types_pb2.SamplingParams:
        allowed = self.allowed_token_ids
        return types_pb2.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            max_tokens=self.token_limit[1],
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids or (),
            allowed_token_ids=None if allowed is None else types_pb2.TokenIdSet(token_ids=allowed),
            logit_bias=[types_pb2.LogitBias(token_id=key, bias=bias) for key, bias in (self.logit_bias or {}).items()],
            num_logprobs=self.num_logprobs,
        )

    def client_error(self, error: InvalidArgumentError, input_name: str) -> InvalidArgumentError:
        """An error of the shared checks, with the field as this request has it.

        Args:
            error: with a field of `inference_pb2.Generation`.
            input_name: of the prompt: `prompt`, `prompt[3]` or `messages`.
        """
        name = self._client_field(error.field, input_name)
        message = error.message.replace(error.field, name, 1) if error.field else error.message
        return InvalidArgumentError(message, field=name, value=error.value, limit=error.limit, reason=error.reason)

    def _client_field(self, field: str, input_name: str) -> str:
        field = field.removeprefix("sampling.")
        entry = re.fullmatch(r"logit_bias\[(\d+)\].*", field)
        if entry is not None:
            return f"logit_bias.{list(self.logit_bias or {})[int(entry[1])]}"
        if field == "max_tokens":
            return self.token_limit[0]
        if field == "num_logprobs":
            return "logprobs"
        match = re.fullmatch(r"(?:chat\.messages|chat|prompt|text|token_ids)(.*)", field)
        return field if match is None else input_name + match[1]
