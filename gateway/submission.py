"""One request at the scheduler, and everything needed to submit it again where it stands.

The outputs so far are kept until the request ends, so what a slow reader has not taken yet costs nothing extra: it is
the end of that list, and is taken in one piece.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from gateway.counts import RequestTimes
from holdback import codec
from holdback.errors import DeadlineExceededError, HoldbackError, InternalError
from holdback.types import FinishReason, ModelInfo, RequestSpec, TokenLogprobs
from holdback.v1 import types_pb2

Clock = Callable[[], float]


class OutOfOrderError(Exception):
    """The scheduler left out outputs. A fault of the stream, not of the request."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended.

    Attributes:
        finish_reason: why.
        stop_token_id: the stop token that ended it; None for EOS and every other reason.
        error: what to raise; None for an ordinary end.
    """

    finish_reason: FinishReason
    stop_token_id: int | None = None
    error: HoldbackError | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """What is new of a request: the outputs since the last update, their log-probabilities if asked for, the end."""

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    ended: Ended | None


@dataclass(frozen=True, slots=True)
class EndRule:
    """When the outputs of a request end it, by the scheduler's own rules. It is applied here where the scheduler was
    lost between a last token and the end, and to leave an ending token out of the text."""

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_tokens: int

    @classmethod
    def of(cls, spec: RequestSpec, eos_token_ids: Sequence[int]) -> EndRule:
        """The rule of one request on a model with these EOS ids."""
        sampling = spec.sampling
        eos = frozenset(() if sampling.ignore_eos else eos_token_ids)
        return cls(eos, frozenset(sampling.stop_token_ids), sampling.min_tokens, sampling.max_tokens)

    def after(self, token_id: int, num_outputs: int) -> Ended | None:
        """The end that the last of `num_outputs` outputs brings; None if more may come."""
        if num_outputs >= self.min_tokens and token_id in self.eos_token_ids:
            return Ended(FinishReason.STOP)
        if num_outputs >= self.min_tokens and token_id in self.stop_token_ids:
            return Ended(FinishReason.STOP, stop_token_id=token_id)
        return Ended(FinishReason.LENGTH) if num_outputs >= self.max_tokens else None


@dataclass(frozen=True, slots=True)
class Shared:
    """What the choices of one prompt have in common, worked out once for all of them.

    Attributes:
        end_rule: when their outputs end them.
        spec: as `codec.encode_shared` gives it.
    """

    end_rule: EndRule
    spec: types_pb2.RequestSpec

    @classmethod
    def of(cls, spec: RequestSpec, model: ModelInfo) -> Shared:
        """`spec`: of any of the choices."""
        return cls(EndRule.of(spec, model.eos_token_ids), codec.encode_shared(spec))


@dataclass(eq=False, slots=True)
class Submission:
    """A request from `EngineClient.submit` until it ends or is closed. One reader takes its updates.

    Attributes:
        spec: as first submitted.
        model_fingerprint: of the model that it was meant for.
        end_rule: when its outputs end it.
        clock: seconds.
        wakeup: set when there is something to take; several submissions may share one.
        times: told of what happens to it; None for nobody.
        shared: with other choices; None for what is alone.
        output_token_ids: all so far, those of `spec` included.
        generation: of the latest submission.
        was_sent: some scheduler has been told of it.
        handle: on the current stream; None while there is none.
        num_cached_tokens: prompt tokens served from cached blocks, at the first binding.
        ended: set once.
    """

    spec: RequestSpec
    model_fingerprint: str
    end_rule: EndRule
    clock: Clock
    wakeup: asyncio.Event
    on_close: Callable[[Submission], None]
    times: RequestTimes | None = None
    shared: Shared | None = None
    output_token_ids: list[int] = field(init=False)
    generation: int = field(init=False)
    was_sent: bool = False
    handle: int | None = None
    num_cached_tokens: int | None = None
    ended: Ended | None = None
    _submitted_at: float = field(init=False)
    _num_taken: int = field(init=False)
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _deadline: float | None = field(init=False)
    _queued_s: float = field(init=False)
    _waits_since: float | None = field(init=False)

    def __post_init__(self) -> None:
        now = self._submitted_at = self.clock()
        self.output_token_ids = list(self.spec.output_token_ids)
        self.generation = self.spec.generation
        self._num_taken = len(self.output_token_ids)
        self._deadline = None if self.spec.deadline_ms is None else now + self.spec.deadline_ms / 1000
        self._queued_s = self.spec.queued_ms / 1000
        self._waits_since = now

    @property
    def has_started(self) -> bool:
        """It ran on some executor."""
        return self.num_cached_tokens is not None or bool(self.output_token_ids)

    @property
    def age_s(self) -> float:
        """Since it was first submitted."""
        return self.clock() - self._submitted_at

    @property
    def num_resumed(self) -> int:
        """Outputs that it was submitted with."""
        return len(self.spec.output_token_ids)

    def current_spec(self) -> RequestSpec:
        """The request as it must be submitted now. Raises DeadlineExceededError when it is too late for it."""
        now = self.clock()
        deadline_ms = None if self._deadline is None else int((self._deadline - now) * 1000)
        if deadline_ms is not None and deadline_ms < 1:
            raise DeadlineExceededError("the deadline passed while the scheduler could not be reached")
        waited_s = self._queued_s + (now - self._waits_since if self._waits_since is not None else 0.0)
        return dataclasses.replace(
            self.spec,
            generation=self.generation,
            output_token_ids=tuple(self.output_token_ids),
            deadline_ms=deadline_ms,
            queued_ms=int(waited_s * 1000) if self.was_sent else self.spec.queued_ms,
        )

    def on_started(self, num_cached_tokens: int, queued_ms: int) -> None:
        """It was bound to an executor, for the first time or again."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached_tokens
        self._queued_s = queued_ms / 1000
        self._waits_since = None
        if self.times is not None:
            self.times.start(self._queued_s)

    def on_lost(self) -> None:
        """Its stream broke; from now on it waits, if it did not anyway."""
        self.handle = None
        if self._waits_since is None:
            self._waits_since = self.clock()

    def on_tokens(self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> None:
        """New outputs; `logprobs` is parallel to `token_ids` or empty. Outputs that are here already are dropped.

        Raises:
            OutOfOrderError: outputs between the last one and `index` are missing.
        """
        num_known = len(self.output_token_ids) - index
        if num_known < 0:
            raise OutOfOrderError(
                f"request {self.spec.request_id!r}: output {index} came after {len(self.output_token_ids)} outputs"
            )
        if num_known >= len(token_ids):
            return
        if self.spec.sampling.num_logprobs is not None:
            new = [entry for entry in logprobs[num_known:] if entry is not None]
            if len(new) != len(token_ids) - num_known:
                self.end(
                    Ended(FinishReason.ERROR, error=InternalError("log-probabilities were asked for and not sent"))
                )
                return
            self._logprobs += new
        self.output_token_ids += token_ids[num_known:]
        if self.times is not None:
            self.times.add_tokens()
        self.wakeup.set()

    def end(self, ended: Ended) -> None:
        """The first end counts."""
        if self.ended is None:
            self.ended = ended
            if self.times is not None:
                self.times.end()
            self.wakeup.set()

    def take(self) -> Update:
        """Everything that is new since the last call, without waiting."""
        token_ids = self.output_token_ids[self._num_taken :]
        self._num_taken = len(self.output_token_ids)
        logprobs, self._logprobs = self._logprobs, []
        return Update(token_ids, logprobs, self.ended)

    async def updates(self) -> AsyncIterator[Update]:
        """Updates as they come, merged while the reader is busy; the last one has `ended`."""
        while True:
            await self.wakeup.wait()
            self.wakeup.clear()
            update = self.take()
            if update.token_ids or update.ended:
                yield update
            if update.ended:
                return

    def close(self) -> None:
        """Gives the request up; the scheduler is told if it has not ended. Does nothing when it has."""
        self.on_close(self)
