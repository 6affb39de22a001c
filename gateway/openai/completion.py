"""The request of `/v1/completions`: one prompt or several, as text or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from gateway.limits import MAX_PROMPT_BYTES, MAX_TOKEN_IDS
from gateway.openai.fields import MAX_UINT32, UNSUPPORTED, GenerationRequest, bounds
from gateway.openai.wording import wrong
from holdback.request_limits import RANGES
from holdback.v1 import inference_pb2

MAX_CHOICES = 256
"""Of one request: prompts times `n`."""

DEFAULT_MAX_TOKENS = 16
"""As OpenAI has it at this endpoint; everywhere else the pool's default counts."""

Prompt = str | list[int]


def _prompts(value: Any) -> list[Prompt]:
    """One or several prompts, each text or token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise wrong("prompt", value, f"a string, token ids, or an array of 1 to {MAX_CHOICES} of either")
    if type(value[0]) is int:
        return [_token_ids("prompt", value)]
    if len(value) > MAX_CHOICES:
        raise wrong("prompt", value, f"at most {MAX_CHOICES} prompts")
    return [_prompt(f"prompt[{index}]", entry) for index, entry in enumerate(value)]


def _prompt(name: str, value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(name, value, "a string or token ids")
    return _token_ids(name, value)


def _token_ids(name: str, value: Sequence[Any]) -> list[int]:
    if len(value) > MAX_TOKEN_IDS:
        raise wrong(name, value, f"at most {MAX_TOKEN_IDS} token ids")
    if set(map(type, value)) <= {int} and min(value, default=0) >= 0 and max(value, default=0) <= MAX_UINT32:
        return list(value)
    index = next(i for i, entry in enumerate(value) if type(entry) is not int or not 0 <= entry <= MAX_UINT32)
    raise wrong(f"{name}[{index}]", value[index], f"token ids, each a whole number in [0, {MAX_UINT32}]")


_TEXT = {"type": "string", "maxLength": MAX_PROMPT_BYTES}
_TOKEN_IDS = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_TOKEN_IDS,
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_UINT32},
}
_LIST = {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES}


class CompletionRequest(GenerationRequest):
    """A request of completions."""

    unsupported = UNSUPPORTED | {
        "add_special_tokens": (None, True),
        "best_of": (None, 1),
        "suffix": (None, ""),
        "response_format": (None, {"type": "text"}),
    }

    prompt: Annotated[
        list[Prompt],
        PlainValidator(_prompts),
        WithJsonSchema(
            {"anyOf": [_TEXT, _TOKEN_IDS, _LIST | {"items": _TEXT}, _LIST | {"items": _TOKEN_IDS}]},
        ),
    ]
    echo: bool | None = Field(None, description="the text starts with the prompt; not with logprobs")
    logprobs: Annotated[int, bounds(RANGES["num_logprobs"])] | None = Field(
        None, description="log-probabilities of the chosen token and of this many most likely ones"
    )

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            raise wrong("echo", True, "false with logprobs, for log-probabilities of the prompt are not supported")
        num_choices = len(self.prompt) * (self.n or 1)
        if num_choices > MAX_CHOICES:
            raise wrong("n", self.n, f"at most {MAX_CHOICES} choices in all, here {num_choices}")
        if self.output_token_ids and len(self.prompt) > 1:
            raise wrong("output_token_ids", self.output_token_ids, "only with one prompt")

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> tuple[str, int | None]:
        return "max_tokens", DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def input_names(self) -> list[str]:
        if len(self.prompt) == 1:
            return ["prompt"]
        return [f"prompt[{index}]" for index in range(len(self.prompt))]

    def generations(self) -> list[inference_pb2.Generation]:
        common = self.generation()
        common.echo = bool(self.echo)
        return [_with_prompt(common, prompt) for prompt in self.prompt]


def _with_prompt(common: inference_pb2.Generation, prompt: Prompt) -> inference_pb2.Generation:
    message = inference_pb2.Generation()
    message.CopyFrom(common)
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.token_ids.extend(prompt)
        message.token_ids.SetInParent()
    return message
