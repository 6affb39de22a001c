"""One choice of an answer: the outputs of one submission turned into text that is certain, up to its end.

Tokens are looked at one by one, so what comes out does not depend on how updates were merged on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.detokenizer import Detokenizer, StopStrings
from gateway.submission import EndRule, Submission
from holdback.errors import HoldbackError
from holdback.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of a choice; `logprobs` is parallel to `token_ids`, or empty where none were asked for."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """Why a choice ended, and with STOP what stopped it: a stop string, a stop token, or neither for EOS."""

    finish_reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(eq=False, slots=True)
class Choice:
    """State of one choice.

    The token that ends a choice, EOS or stop token, adds nothing to its text, nor does a stop string.

    Attributes:
        index: among the choices of the request.
        end_rule: when its outputs end it.
        detokenizer: primed with the prompt.
        stop: its stop strings.
        submission: where outputs come from; None while none is needed.
        num_resumed: outputs that the client has had before.
        num_outputs: tokens so far, resumed ones included.
        end: set once; nothing comes after it.
        error: what to raise instead of an end.
    """

    index: int
    end_rule: EndRule
    detokenizer: Detokenizer
    stop: StopStrings
    submission: Submission | None = None
    num_resumed: int = 0
    num_outputs: int = 0
    end: ChoiceEnd | None = None
    error: HoldbackError | None = None

    def resume(self, token_ids: Sequence[int]) -> None:
        """Outputs that the client has already, with the text that came with them. They may end the choice."""
        for token_id in token_ids:
            self._add(token_id)
            if self.end is not None:
                break
        self.num_resumed = self.num_outputs

    def advance(self) -> Delta:
        """Everything that is new. Sets `end` or `error` when that is all there will be."""
        if self.submission is None:
            return Delta("", (), ())
        texts = []
        update = self.submission.take()
        num_taken = 0
        for token_id in update.token_ids:
            texts.append(self._add(token_id))
            num_taken += 1
            if self.end is not None:
                self.submission.close()
                break
        if self.end is None and update.ended is not None:
            end = ChoiceEnd(update.ended.finish_reason, None, update.ended.stop_token_id)
            self.error = update.ended.error
            if self.error is None:
                texts.append(self._finish(end))
            else:
                self.end = end  # what is withheld would come twice to a client that resumes
        return Delta("".join(texts), update.token_ids[:num_taken], update.logprobs[:num_taken])

    def _add(self, token_id: int) -> str:
        """One output; the text that became certain."""
        self.num_outputs += 1
        ended = self.end_rule.after(token_id, self.num_outputs)
        if ended is not None and ended.finish_reason is FinishReason.STOP:
            return self._finish(ChoiceEnd(FinishReason.STOP, stop_token_id=ended.stop_token_id))
        text, matched = self.stop.add(self.detokenizer.add(token_id))
        if matched is not None:
            self.end = ChoiceEnd(FinishReason.STOP, stop_string=matched)
        elif ended is not None:
            text += self._finish(ChoiceEnd(ended.finish_reason))
        return text

    def _finish(self, end: ChoiceEnd) -> str:
        """Ends the choice and gives out what was withheld."""
        text, matched = self.stop.add(self.detokenizer.flush())
        self.end = end if matched is None else ChoiceEnd(FinishReason.STOP, stop_string=matched)
        return text + self.stop.flush()
