"""How the two endpoints write what a generation gives: whole answers, and the choices of stream events.

Events are many, so their unchanging parts are not built again each time: a choice of an event is put together as text.
That events have the shapes of `shapes` is for the tests to say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from gateway.choice import ChoiceEnd
from gateway.detokenizer import TokenTable
from gateway.openai.logprobs import TextOffsets, chat_logprobs, completion_logprobs
from gateway.openai.shapes import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Shape,
    Usage,
)
from holdback.errors import InternalError
from holdback.types import TokenLogprobs


@dataclass(eq=False, slots=True)
class ChoiceState:
    """What is known of one choice of an answer while it comes.

    Attributes:
        index: in the answer.
        table: of the pool's vocabulary.
        texts: pieces so far, of an answer that is not streamed.
        logprobs: entries so far, of such an answer; None where none were asked for.
        offsets: of the tokens; None where no log-probabilities were asked for.
        end: once it has ended.
    """

    index: int
    table: TokenTable
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    offsets: TextOffsets | None = None
    end: ChoiceEnd | None = None


class Style(Protocol):
    """One endpoint's way to write.

    Attributes:
        id_prefix: of answers.
        chunk_object: `object` of stream events.
    """

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    def opening(self, choice: ChoiceState) -> str | None:
        """The first event of a choice; None where there is none."""

    def piece(self, choice: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs]) -> str:
        """New output of a choice."""

    def ending(self, choice: ChoiceState, end: ChoiceEnd) -> str:
        """The end of a choice."""

    def answer(self, head: dict[str, Any], choices: Sequence[ChoiceState], usage: Usage) -> Shape:
        """A complete answer; every choice has its end."""


class CompletionStyle:
    """`/v1/completions`."""

    id_prefix: ClassVar[str] = "cmpl"
    chunk_object: ClassVar[str] = "text_completion"

    def opening(self, choice: ChoiceState) -> None:
        return None

    def piece(self, choice: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs]) -> str:
        shown = self._logprobs(choice, logprobs)
        return self._chunk(choice, text, "null" if shown is None else shown.model_dump_json())

    def ending(self, choice: ChoiceState, end: ChoiceEnd) -> str:
        return self._chunk(choice, "", "null", json.dumps(end.finish_reason.value), json.dumps(stop_reason(end)))

    def answer(self, head: dict[str, Any], choices: Sequence[ChoiceState], usage: Usage) -> Completion:
        return Completion(**head, choices=list(map(self._choice, choices)), usage=usage)

    def _choice(self, choice: ChoiceState) -> CompletionChoice:
        end = ending_of(choice)
        return CompletionChoice(
            index=choice.index,
            text="".join(choice.texts),
            logprobs=None if choice.logprobs is None else self._logprobs(choice, choice.logprobs),
            finish_reason=end.finish_reason.value,  # type: ignore[arg-type]
            stop_reason=stop_reason(end),
        )

    def _logprobs(self, choice: ChoiceState, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs | None:
        if choice.offsets is None:
            return None
        return completion_logprobs(entries, choice.table, choice.offsets)

    def _chunk(
        self, choice: ChoiceState, text: str, logprobs: str, finish_reason: str = "null", stop: str = "null"
    ) -> str:
        return (
            f'{{"index":{choice.index},"text":{json.dumps(text)},"logprobs":{logprobs},'
            f'"finish_reason":{finish_reason},"stop_reason":{stop}}}'
        )


class ChatStyle:
    """`/v1/chat/completions`."""

    id_prefix: ClassVar[str] = "chatcmpl"
    chunk_object: ClassVar[str] = "chat.completion.chunk"

    def opening(self, choice: ChoiceState) -> str:
        return self._chunk(choice, '{"role":"assistant","content":""}', "null", "null")

    def piece(self, choice: ChoiceState, text: str, logprobs: Sequence[TokenLogprobs]) -> str:
        shown = self._logprobs(choice, logprobs)
        delta = f'{{"content":{json.dumps(text)}}}'
        return self._chunk(choice, delta, "null" if shown is None else shown.model_dump_json(), "null")

    def ending(self, choice: ChoiceState, end: ChoiceEnd) -> str:
        reasons = f'{json.dumps(end.finish_reason.value)},"stop_reason":{json.dumps(stop_reason(end))}'
        return self._chunk(choice, "{}", "null", reasons)

    def answer(self, head: dict[str, Any], choices: Sequence[ChoiceState], usage: Usage) -> ChatCompletion:
        return ChatCompletion(**head, choices=list(map(self._choice, choices)), usage=usage)

    def _choice(self, choice: ChoiceState) -> ChatChoice:
        end = ending_of(choice)
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(content="".join(choice.texts)),
            logprobs=None if choice.logprobs is None else self._logprobs(choice, choice.logprobs),
            finish_reason=end.finish_reason.value,  # type: ignore[arg-type]
            stop_reason=stop_reason(end),
        )

    def _logprobs(self, choice: ChoiceState, entries: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return None if choice.logprobs is None else chat_logprobs(entries, choice.table)

    def _chunk(self, choice: ChoiceState, delta: str, logprobs: str, finish: str) -> str:
        return f'{{"index":{choice.index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}}}'


def ending_of(choice: ChoiceState) -> ChoiceEnd:
    """Raises InternalError for a choice without an end."""
    if choice.end is None:
        raise InternalError(f"choice {choice.index} has no end")
    return choice.end


def stop_reason(end: ChoiceEnd) -> str | int | None:
    """What stopped a choice, as vLLM tells it: a stop string, a stop token, or nothing."""
    return end.stop_string if end.stop_string is not None else end.stop_token_id
