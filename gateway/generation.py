"""One generation: from checked fields to submissions, and from their outputs to choices."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gateway.access import ANYONE, Caller
from gateway.choice import Choice, Delta
from gateway.counts import RequestTimes
from gateway.detokenizer import Detokenizer, StopStrings
from gateway.limits import Checked
from gateway.pool import Pool
from gateway.submission import EndRule, Shared
from holdback.errors import DeadlineExceededError, HoldbackError, RequestAbortedError
from holdback.types import FinishReason, ModelInfo, RequestSpec, SamplingParams, TraceContext, Usage
from holdback.v1 import inference_pb2

T = TypeVar("T")

SEED_BITS = 52
"""Of a drawn seed: with the index of a choice it stays below 2**53, as far as JavaScript has exact whole numbers."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """What a call brings beside its message.

    Attributes:
        deadline: in seconds of the event loop's clock; None without one.
        trace: the client's.
        caller: whose API key it has.
        is_stream: the answer is streamed.
    """

    deadline: float | None = None
    trace: TraceContext = field(default_factory=TraceContext)
    caller: Caller = ANYONE
    is_stream: bool = False

    @property
    def deadline_ms(self) -> int | None:
        """Milliseconds that are left, at least 1; None without a deadline. Raises DeadlineExceededError."""
        if self.deadline is None:
            return None
        left_s = self.deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise DeadlineExceededError("the deadline passed before the request could be submitted")
        return max(1, int(left_s * 1000))


class GenerationRun:
    """One generation with its choices. Close it whatever happens; closing ends what still runs.

    Attributes:
        request_id: unique among those of its caller that live on this gateway.
        pool: that runs it.
        scheduler_request_id: its id, or the stem of those of its choices, at the scheduler.
        seed: of choice 0, drawn where the request names none.
        prompt_token_ids: once submitted.
        choices: by index, once submitted.
        clock: seconds, of the gateway's loop.
        arrived_at: on it.
        submitted_at: the same; None before.
        trace: that goes on to the scheduler, once submitted.
    """

    def __init__(self, request_id: str, pool: Pool, checked: Checked, scheduler_request_id: str | None = None) -> None:
        self.clock = asyncio.get_running_loop().time
        self.arrived_at = self.clock()
        self.submitted_at: float | None = None
        self.trace = TraceContext()
        self._has_output = False
        self.request_id = request_id
        self.scheduler_request_id = request_id if scheduler_request_id is None else scheduler_request_id
        self.pool = pool
        self.seed = checked.sampling.seed if checked.seed_given else secrets.randbits(SEED_BITS)
        self.prompt_token_ids: Sequence[int] = ()
        self.choices: list[Choice] = []
        self._checked = checked
        self._wakeup = asyncio.Event()
        self._failure: HoldbackError | None = None
        self._failed = asyncio.Event()

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the run fails or is aborted first; then raises why."""
        working = asyncio.create_task(work)
        failing = asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({working, failing}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                raise self._failure
            return await working
        finally:
            working.cancel()
            failing.cancel()

    async def submit(self, prompt_token_ids: Sequence[int], model: ModelInfo, call: CallContext) -> None:
        """Checks the request against the model and submits each choice that has not ended already.

        Raises:
            InvalidArgumentError: the request does not fit the model.
            AlreadyExistsError: the id is alive at the scheduler.
            UnavailableError: the scheduler has been away for too long.
            HoldbackError: the run failed or was aborted meanwhile.
        """
        default_max_tokens = self.pool.engine.status.default_max_tokens
        sampling = self._checked.fit(prompt_token_ids, model, default_max_tokens)
        self.prompt_token_ids = prompt_token_ids
        self.submitted_at, self.trace = self.clock(), call.trace
        shared: Shared | None = None
        for index in range(self._checked.n):
            spec = self._spec_of_choice(index, sampling, call)
            if shared is None and self._checked.n > 1:
                shared = Shared.of(spec, model)
            self._add_choice(index, spec, model, shared)
            if len(self.choices) < self._checked.n:
                await asyncio.sleep(0)  # tokens of others go between
            if self._failure is not None:
                raise self._failure

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """New output of each choice, merged while the caller is busy, until every choice has its end.

        Raises:
            HoldbackError: a choice failed; the others are closed with the run.
        """
        running = list(self.choices)
        self._wakeup.set()  # a choice may have ended before it began
        while running:
            await self._wakeup.wait()
            self._wakeup.clear()
            if self._failure is not None:
                raise self._failure
            for choice in list(running):
                delta = choice.advance()
                if delta.token_ids:
                    self._count_tokens(len(delta.token_ids))
                if choice.end is not None:
                    running.remove(choice)
                if choice.end is not None or delta.text or delta.token_ids:
                    yield choice, delta
                if choice.error is not None:
                    raise choice.error

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were served from cached blocks, as far as is known."""
        first = self.choices[0].submission if self.choices else None
        return (first.num_cached_tokens or 0) if first is not None else 0

    @property
    def usage(self) -> Usage:
        """The prompt counts once, completions are summed."""
        return Usage(
            prompt_tokens=len(self.prompt_token_ids),
            completion_tokens=sum(choice.num_outputs for choice in self.choices),
            cached_tokens=self.num_cached_tokens,
        )

    def abort(self) -> None:
        """Ends every choice with finish reason `abort`. A run that has not submitted all yet fails instead."""
        if len(self.choices) < self._checked.n:
            self.fail(RequestAbortedError(f"request {self.request_id!r} was aborted before it began"))
        self.close()

    def fail(self, error: HoldbackError) -> None:
        """Makes the call end with an error."""
        self._failure = error
        self._failed.set()
        self._wakeup.set()

    def close(self) -> None:
        """Aborts what still runs. Does nothing when all has ended."""
        for choice in self.choices:
            if choice.submission is not None:
                choice.submission.close()

    def count_ends(self) -> None:
        """Tells the pool's counts how each choice ended, and of the tokens that nobody took from one that was cut off;
        to be called once, when the run is closed."""
        for choice in self.choices:
            if choice.submission is None or choice.submission.times is None:
                continue
            untaken = () if choice.end is not None else choice.submission.take().token_ids
            if untaken:
                self._count_tokens(len(untaken))
            num_outputs = choice.num_outputs - choice.num_resumed
            times, num_prompt = choice.submission.times, len(self.prompt_token_ids)
            self.pool.counts.end(self.end_of(choice), times, num_prompt, num_outputs)

    def end_of(self, choice: Choice) -> FinishReason:
        """How a choice ended, of a run that is closed."""
        return FinishReason.ABORT if choice.end is None else choice.end.finish_reason

    @property
    def failure(self) -> HoldbackError | None:
        """What the call was made to end with."""
        return self._failure

    def _count_tokens(self, num_tokens: int) -> None:
        counts = self.pool.counts
        if not self._has_output and not self._checked.output_token_ids:
            counts.num_prompt_tokens += len(self.prompt_token_ids)
            counts.num_cached_tokens += self.num_cached_tokens
        self._has_output = True
        counts.num_generation_tokens += num_tokens

    def _spec_of_choice(self, index: int, sampling: SamplingParams, call: CallContext) -> RequestSpec:
        checked = self._checked
        return RequestSpec(
            request_id=self.scheduler_request_id if checked.n == 1 else f"{self.scheduler_request_id}/{index}",
            prompt_token_ids=self.prompt_token_ids,
            output_token_ids=checked.output_token_ids,
            sampling=dataclasses.replace(sampling, seed=seed_of_choice(self.seed, index)),
            priority=checked.priority,
            cache_salt=checked.cache_salt,
            deadline_ms=call.deadline_ms,
            trace=call.trace,
        )

    def _add_choice(self, index: int, spec: RequestSpec, model: ModelInfo, shared: Shared | None) -> None:
        checked, table = self._checked, self.pool.tokenizer.table
        choice = Choice(
            index=index,
            end_rule=EndRule.of(spec, model.eos_token_ids) if shared is None else shared.end_rule,
            detokenizer=Detokenizer(table, self.prompt_token_ids, keep_special_tokens=checked.keep_special_tokens),
            stop=StopStrings(checked.stop),
        )
        self.choices.append(choice)
        choice.resume(checked.output_token_ids)
        if choice.end is None:
            times = RequestTimes(self.pool.counts, self.clock, self.arrived_at)
            choice.submission = self.pool.engine.submit(spec, model, self._wakeup, times, shared)


def seed_of_choice(seed: int, index: int) -> int:
    """`seed + index` as a signed number of 64 bits."""
    return (seed + index + 2**63) % 2**64 - 2**63


async def prompt_text(run: GenerationRun, message: inference_pb2.Generation) -> str:
    """The prompt as `echo` shows it: text as it was sent, everything else from its tokens."""
    if message.WhichOneof("input") == "text":
        return message.text
    keep = message.keep_special_tokens
    return await run.pool.tokenizer.decode(run.prompt_token_ids, keep_special_tokens=keep, whole_only=True)
