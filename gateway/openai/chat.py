"""The request of `/v1/chat/completions`: messages of text."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from gateway.limits import MAX_MESSAGES, MAX_PROMPT_BYTES
from gateway.openai.fields import MAX_UINT32, UNSUPPORTED, GenerationRequest, bounds
from gateway.openai.wording import check_asks_for_nothing, wrong
from holdback.request_limits import RANGES
from holdback.v1 import inference_pb2

MAX_PARTS = 1024
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of messages, and what the model's template is told: `developer` is OpenAI's newer word for `system`."""

_NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "name": (None,),
    "reasoning": (None,),
    "reasoning_content": (None,),
    "refusal": (None,),
    "tool_call_id": (None,),
    "tool_calls": (None, []),
}
"""So that a message of an answer can be sent back as it came."""


def _messages(value: Any) -> list[inference_pb2.ChatMessage]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise wrong("messages", value, f"an array of 1 to {MAX_MESSAGES} messages")
    return [_message(f"messages[{index}]", entry) for index, entry in enumerate(value)]


def _message(name: str, value: Any) -> inference_pb2.ChatMessage:
    if not isinstance(value, dict):
        raise wrong(name, value, "an object with role and content")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{name}.role", role, f"{', '.join(ROLES)}; others are not supported")
    for key, entry in value.items():
        if key in _NEUTRAL_IN_MESSAGE:
            check_asks_for_nothing(f"{name}.{key}", entry, _NEUTRAL_IN_MESSAGE[key])
        elif key not in ("role", "content"):
            raise wrong(f"{name}.{key}", entry, "no such field; a message has role and content")
    return inference_pb2.ChatMessage(role=ROLES[role], content=_content(f"{name}.content", value.get("content")))


def _content(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_PARTS:
        raise wrong(name, value, f"a string, or an array of 1 to {MAX_PARTS} text parts")
    return "\n".join(_part(f"{name}[{index}]", part) for index, part in enumerate(value))


def _part(name: str, value: Any) -> str:
    if not isinstance(value, dict):
        raise wrong(name, value, "an object with type and text")
    if value.get("type") != "text":
        raise wrong(f"{name}.type", value.get("type"), "'text'; images, audio and files are not supported")
    unknown = next((key for key in value if key not in ("type", "text")), None)
    if unknown is not None:
        raise wrong(f"{name}.{unknown}", value[unknown], "no such field; a text part has type and text")
    text = value.get("text")
    if not isinstance(text, str):
        raise wrong(f"{name}.text", text, "a string")
    return text


_TEXT = {"type": "string", "maxLength": MAX_PROMPT_BYTES}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "additionalProperties": False,
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "maxItems": MAX_PARTS, "items": _PART}]},
    },
    "additionalProperties": False,
}


class ChatCompletionRequest(GenerationRequest):
    """A request of chat completions."""

    unsupported = UNSUPPORTED | {
        "add_generation_prompt": (None, True),
        "add_special_tokens": (None, False),
        "audio": (None,),
        "chat_template": (None,),
        "chat_template_kwargs": (None, {}),
        "continue_final_message": (None, False),
        "documents": (None, []),
        "echo": (None, False),
        "function_call": (None, "none"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "parallel_tool_calls": (None, True, False),
        "prediction": (None,),
        "reasoning_effort": (None,),
        "response_format": (None, {"type": "text"}),
        "store": (None, False),
        "tool_choice": (None, "none"),
        "tools": (None, []),
        "verbosity": (None, "medium"),
        "web_search_options": (None,),
    }

    messages: Annotated[
        list[inference_pb2.ChatMessage],
        PlainValidator(_messages),
        WithJsonSchema({"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _MESSAGE}),
    ]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_UINT32)] | None = Field(
        None, description="the newer name of max_tokens"
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, bounds(RANGES["num_logprobs"])] | None = Field(None, description="needs logprobs")

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", self.top_logprobs, "null, unless logprobs is true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise wrong("max_tokens", self.max_tokens, f"null, or max_completion_tokens ({self.max_completion_tokens})")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def input_names(self) -> list[str]:
        return ["messages"]

    def generations(self) -> list[inference_pb2.Generation]:
        message = self.generation()
        message.chat.CopyFrom(inference_pb2.ChatMessages(messages=self.messages))
        return [message]
