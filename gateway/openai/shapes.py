"""What the API answers, field by field as OpenAI and vLLM name them."""

from __future__ import annotations

from typing import Literal

import pydantic

from holdback import types

Reason = Literal["stop", "length", "abort"]
"""`abort`, as vLLM has it: somebody ended the request by its id, and this is what there was."""

MIN_LOGPROB = -9999.0
"""As OpenAI writes what is less likely, minus infinity included, which JSON cannot write."""


class Shape(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class PromptDetails(Shape):
    """Where prompt tokens came from."""

    cached_tokens: int


class Usage(Shape):
    """Tokens of a request; the prompt counts once, completions are summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, usages: list[types.Usage]) -> Usage:
        """Of all prompts of a request together."""
        prompt = sum(usage.prompt_tokens for usage in usages)
        completion = sum(usage.completion_tokens for usage in usages)
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptDetails(cached_tokens=sum(usage.cached_tokens for usage in usages)),
        )


class Answer(Shape):
    """What all answers begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionLogprobs(Shape):
    """One entry of each for every sampled token, the one that ended the choice included."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason | None
    stop_reason: str | int | None


class Completion(Answer):
    """Answer of `/v1/completions`; with `stream`, each event is one, and `usage` comes where it was asked for."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Shape):
    """A token with its bytes, for some tokens are no text alone."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    """One entry for every sampled token, the one that ended the choice included."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(Shape):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Shape):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    stop_reason: str | int | None


class ChatCompletion(Answer):
    """Answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Shape):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Shape):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    stop_reason: str | int | None = None


class ChatCompletionChunk(Answer):
    """One event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Model(Shape):
    """A name that selects a model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["holdback"] = "holdback"
    root: str
    max_model_len: int | None


class ModelList(Shape):
    object: Literal["list"] = "list"
    data: list[Model]


class ResumableChoice(Shape):
    """A choice as far as it came: send these outputs and this seed, and what is missing comes."""

    index: int
    seed: int
    output_token_ids: list[int]


class Resume(Shape):
    """What is needed to go on at another gateway."""

    model: str
    choices: list[ResumableChoice]


class Error(Shape):
    """What went wrong; `param` is the field, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None
    resume: Resume | None = None


class ErrorAnswer(Shape):
    error: Error


class Health(Shape):
    status: Literal["ok", "unready"]
