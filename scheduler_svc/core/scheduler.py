"""Paged blocks, prefix cache, chunked prefill and the life cycle of requests, for one executor.

One step is `schedule()`, run elsewhere, `update_from_output()`. `schedule()` gives every request of `running` its next
chunk or its next token, then binds waiting requests while tokens, slots and blocks last. `update_from_output()` appends
what was sampled and ends what is at its end. Everything is a function of the state: no clock, no I/O.

A request is in exactly one place: in `waiting`, or bound, which is in `running` and `requests` with a slot and blocks.
Between `schedule()` and its result the request runs ahead of what is known: `num_computed_tokens` counts steps in
flight. A result is attributed by the scheduler's own record of the step; rows of requests that are no longer bound are
thrown away.

This class prefills and decodes in one batch where both are there. What the hardware needs beyond that is in
`NeuronScheduler`; a second step in flight is in `AsyncScheduler`.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

from holdback.errors import AlreadyExistsError, ErrorReason, InternalError, InvalidArgumentError
from holdback.types import FinishReason, ModelRunnerOutput, NewRequestData, Phase, SchedulerOutput
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.hits import Hit, HitFinder
from scheduler_svc.core.output import Batch, DecodeRows, Ending, StepRecord, StepUpdate
from scheduler_svc.core.prefix_cache import PrefixCache, PrefixCacheStats
from scheduler_svc.core.queue import WaitingQueue, new_queue
from scheduler_svc.core.request import Request

__all__ = ["Scheduler", "SchedulerConfig"]


class Scheduler:
    """Decides the steps of one executor.

    Attributes:
        config: sizes, checked.
        waiting: requests bound to no lane, the next one first.
        running: bound requests in schedule order.
        requests: bound requests by id.
        block_pool: the executor's KV blocks.
        prefix_cache: index of the blocks with known content.
        max_steps_in_flight: how many steps may be scheduled and not yet updated.
    """

    max_steps_in_flight: ClassVar[int] = 1

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue | None = None) -> None:
        self.config = config
        self.max_num_seqs = config.max_num_seqs
        self.waiting: WaitingQueue = new_queue(config.scheduling_policy) if waiting is None else waiting
        self.prefix_cache = PrefixCache()
        self._block_size = config.block_size
        self._hits = HitFinder(self.prefix_cache, config.block_size, enabled=config.enable_prefix_caching)
        self._forget_executor()

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._steps)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached ones included; never the null block."""
        return self.block_pool.num_free

    @property
    def num_usable_blocks(self) -> int:
        """All blocks but the null block."""
        return self.block_pool.num_usable

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        return PrefixCacheStats(self.prefix_cache.queries, self.prefix_cache.hits)

    def num_hit_tokens(self, request: Request) -> int:
        """Tokens that a request would get from the prefix cache if it were bound now."""
        return len(self._hits.find(request).block_ids) * self._block_size

    # ---- requests come and go ----

    def add_request(self, request: Request) -> None:
        """Puts a request at the end of `waiting`.

        Raises:
            AlreadyExistsError: its id is bound or waiting.
            InvalidArgumentError: its prefill leaves no room for a token within `max_model_len` (K10).
        """
        if request.req_id in self.requests or request.req_id in self.waiting:
            raise AlreadyExistsError(f"req_id is {request.req_id!r}; allowed: an id that is not in use")
        if not 0 < request.num_prefill_tokens < self.config.max_model_len:
            raise InvalidArgumentError.of(
                "prompt_token_ids", f"{request.num_prefill_tokens} tokens", f"[1, {self.config.max_model_len})"
            )
        request.limit_length(self.config.max_model_len)
        self.waiting.append(request)

    def finish_request(self, req_id: str, reason: FinishReason) -> Request | None:
        """Ends a request from outside, wherever it is. Slot and blocks are free at once.

        A step in flight may still compute it; that row is thrown away.

        Returns:
            The request, or None when it is neither bound nor waiting.
        """
        request = self.requests.get(req_id)
        if request is not None:
            self._unbind(request)
            self.running.remove(request)
        else:
            request = self.waiting.remove(req_id)
            if request is None:
                return None
            if req_id not in self._finished_req_ids:
                self._finished_req_ids.append(req_id)
        request.finish_reason = reason
        return request

    def release_all(self) -> list[Request]:
        """Gives up a lost lane: nothing is bound or in flight, no block has content, steps count from 0 again.

        Returns:
            Every bound request as `continuation()`, the one bound last first, which is running order. Putting each in
            turn in front of a queue leaves the one bound first at its head.
        """
        released = [request.continuation() for request in reversed(self.requests.values())]
        for request in self.requests.values():
            request.slot = None
            request.block_ids = []
        self.prefix_cache.clear()
        self._forget_executor()
        return released

    def _forget_executor(self) -> None:
        """The state towards an executor that has been told nothing."""
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.block_pool: BlockPool[Request] = BlockPool(self.config.num_blocks, self.prefix_cache)
        # What the head hit when it was last looked up. Who is bound meanwhile may hold more of it.
        self._held_hits: tuple[Request, Hit, int] | None = None
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        self._finished_req_ids: list[str] = []
        self._executor_must_hear = False
        self._num_unbound = 0
        self._next_step = 0
        self._steps: deque[StepRecord] = deque()
        self._last_decode = DecodeRows()

    def _unbind(self, request: Request) -> None:
        """Takes slot and blocks; the caller takes it out of `running`. `slot` is None from here on."""
        if request.slot is None:
            raise InternalError(f"request {request.req_id!r} is not bound")
        del self.requests[request.req_id]
        self.block_pool.release(request.block_ids, request)
        self._free_slots.append(request.slot)
        request.slot = None
        request.block_ids = []
        self._finished_req_ids.append(request.req_id)
        self._executor_must_hear = True
        self._num_unbound += 1

    # ---- schedule ----

    def schedule(self) -> SchedulerOutput:
        """Decides the next step; it may be empty.

        An output that neither schedules anything nor ends a request that the executor knows need not be sent; it
        carries the number of the next one.

        Raises:
            RuntimeError: `max_steps_in_flight` steps are already waiting for their result.
        """
        if len(self._steps) >= self.max_steps_in_flight:
            raise RuntimeError(f"schedule() with {len(self._steps)} in flight; allowed: {self.max_steps_in_flight - 1}")
        batch = Batch()
        self._schedule_running(batch)
        self._schedule_waiting(batch)
        return self._finish_step(batch)

    def _schedule_running(self, batch: Batch) -> None:
        """The row loop of a decode step; everything that a plain decode row does not need is in `_extend`."""
        add_row, add_computed = batch.rows.append, batch.num_computed_tokens.append
        for request in self.running:
            num_computed = request.num_computed_tokens
            if num_computed < request.decode_until:
                request.num_computed_tokens = num_computed + 1
            elif not self._extend(request, batch):
                continue
            add_row(request)
            add_computed(num_computed)

    def _extend(self, request: Request, batch: Batch) -> bool:
        """Schedules a prefill chunk, or a decode token that needs a block. False when there is nothing to schedule.

        Nothing is left of a request that is scheduled up to its last allowed token (K8): it keeps slot and blocks until
        the result of that step.
        """
        row, num_computed = len(batch.rows), request.num_computed_tokens
        if num_computed >= request.num_prefill_tokens:
            if num_computed >= request.last_computed:
                return False
            block_id = self.block_pool.take(request)
            request.block_ids.append(block_id)
            request.num_computed_tokens = num_computed + 1
            request.decode_until = min(num_computed + self._block_size, request.last_computed)
            batch.new_blocks[row] = [block_id]
            return True
        # A token stays for every row behind this one, as decode rows do not ask.
        budget = self.config.max_num_batched_tokens - batch.num_tokens - (len(self.running) - 1 - row)
        num_tokens = min(request.num_prefill_tokens - num_computed, budget)
        if num_tokens <= 0:
            return False
        batch.count_prefill(row, num_tokens)
        new_block_ids = self._prefill(request, num_tokens, batch)
        if new_block_ids:
            batch.new_blocks[row] = new_block_ids
        return True

    def _prefill(self, request: Request, num_tokens: int, batch: Batch) -> list[int]:
        """Counts a chunk as computed, takes the blocks that it needs, notes the blocks that it fills."""
        block_size, start = self._block_size, request.num_computed_tokens
        end = start + num_tokens
        new_block_ids = self.block_pool.allocate(-(-end // block_size) - len(request.block_ids), request)
        request.block_ids += new_block_ids
        request.num_computed_tokens = end
        if self.config.enable_prefix_caching:
            batch.filled_blocks += [(request, index) for index in range(start // block_size, end // block_size)]
        if end == request.num_prefill_tokens:
            request.start_decode(block_size, publishes=self.config.enable_prefix_caching)
        return new_block_ids

    def _schedule_waiting(self, batch: Batch) -> None:
        while len(self.running) < self.max_num_seqs and batch.num_tokens < self.config.max_num_batched_tokens:
            request = self.waiting.peek()
            if request is None or self._why_not_placed(request) is not None:
                return
            self._bind(request, batch)
            self.waiting.popleft()
            self.running.append(request)

    def _why_not_placed(self, request: Request) -> str | None:
        """K3: the blocks of the whole prompt must be free. A hit that is held counts as there, a free one as taken."""
        needed = -(-request.num_prefill_tokens // self._block_size)
        num_free = self.block_pool.num_free
        if needed <= num_free:
            return None
        num_held = self._most_held_hits(request)
        if needed - num_held <= num_free:
            # The most that there can be is not enough to know.
            self._held_hits = None
            num_held = self._most_held_hits(request)
        if needed - num_held <= num_free:
            return None
        return f"the prompt needs {needed - num_held} more blocks; {num_free} of {self.num_usable_blocks} are free"

    def _most_held_hits(self, request: Request) -> int:
        """An upper bound of the held blocks that a request hits; exact when it had to look."""
        if self._held_hits is not None:
            of_request, hit, num_held = self._held_hits
            if of_request is request and not self._hits.may_be_longer(hit):
                return num_held
        hit = self._hits.find(request)
        num_held = sum(map(self.block_pool.is_held, hit.block_ids))
        self._held_hits = request, hit, num_held
        return num_held

    def _bind(self, request: Request, batch: Batch) -> None:
        """Gives a request its slot, its hit and its first chunk."""
        request.limit_length(self.config.max_model_len)
        request.slot = self._free_slots.pop()
        self.requests[request.req_id] = request
        # The hit is held before blocks are taken, or they could be taken from it.
        request.block_ids = self._hits.find(request).block_ids
        self._held_hits = None
        self.block_pool.hold(request.block_ids, request)
        request.num_hit_blocks = len(request.block_ids)
        num_hit_tokens = request.num_hit_blocks * self._block_size
        request.num_computed_tokens = num_hit_tokens
        if request.is_first_run:
            request.num_cached_tokens = num_hit_tokens
            self.prefix_cache.count_query(request.num_prompt_tokens, num_hit_tokens)
        budget = self.config.max_num_batched_tokens - batch.num_tokens
        num_tokens = min(request.num_prefill_tokens - num_hit_tokens, budget)
        self._prefill(request, num_tokens, batch)
        new = NewRequestData(request.req_id, request.spec, request.slot, list(request.block_ids), num_hit_tokens)
        batch.add_new(request, new, num_tokens)

    def _finish_step(self, batch: Batch) -> SchedulerOutput:
        """Makes the message to the executor, and remembers the step until its result comes."""
        # Only now, so that no request hits a block that its own step writes (K7).
        for request, index in batch.filled_blocks:
            self._publish(request, index)
        output = batch.to_output(self._next_step, self._finished_req_ids, self._last_decode)
        if output.phase is Phase.DECODE:
            req_ids = output.scheduled_cached_reqs.req_ids
            self._last_decode = DecodeRows(batch.rows, req_ids, output.num_scheduled_tokens)
        if output.num_scheduled_tokens:
            self._steps.append(batch.to_record(self._next_step, self._num_unbound))
        if output.num_scheduled_tokens or self._executor_must_hear:
            self._next_step += 1
        self._finished_req_ids = []
        self._executor_must_hear = False
        return output

    # ---- update ----

    def update_from_output(self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput) -> StepUpdate:
        """Applies the result of the oldest step in flight.

        Returns:
            What the step brought: one update per request, failed ones first, then in schedule order.

        Raises:
            InternalError: the result is not that of the oldest step in flight, or does not fit its rows. Nothing is
                changed then.
        """
        if not scheduler_output.num_scheduled_tokens:
            return StepUpdate()
        record = self._take_record(scheduler_output.step, runner_output)
        failed = (record.rows[row] for row in runner_output.failed_rows)
        endings = [self._fail(request) for request in failed if request.slot is not None]
        update = record.to_update(runner_output, self._num_unbound)
        update.endings = endings
        add_index = update.output_indices.append
        for request, token_id in zip(update.requests, update.token_ids, strict=True):
            output_token_ids = request.output_token_ids
            index = len(output_token_ids)
            output_token_ids.append(token_id)
            add_index(index)
            if index + 1 >= request.outputs_until or token_id in request.stop_ids:
                self._settle(request, token_id, endings)
        if self._executor_must_hear:
            self.running = [request for request in self.running if request.slot is not None]
        return update

    def _take_record(self, step: int, runner_output: ModelRunnerOutput) -> StepRecord:
        if not self._steps:
            raise InternalError(f"result of step {runner_output.step} with no step in flight")
        record = self._steps[0]
        if not record.step == step == runner_output.step:
            raise InternalError(f"result of step {runner_output.step} for step {step}; expected step {record.step}")
        num_rows, num_sampling = len(record.rows), len(record.sampling_rows)
        num_tokens, num_logprobs = len(runner_output.sampled_token_ids), len(runner_output.logprobs)
        if num_tokens != num_sampling or num_logprobs not in (0, num_sampling):
            found = f"{num_tokens} tokens for {num_sampling} rows that sample and {num_logprobs} log-probabilities"
            raise InternalError(f"step {step} has {found}")
        if not all(0 <= row < num_rows for row in runner_output.failed_rows):
            raise InternalError(f"failed_rows of step {step} is {runner_output.failed_rows}; allowed: [0, {num_rows})")
        return self._steps.popleft()

    def _settle(self, request: Request, token_id: int, endings: list[Ending]) -> None:
        """After an output that may complete a cacheable block or end the request."""
        num_outputs = len(request.output_token_ids)
        if num_outputs >= request.next_block_at:
            # The newest output is known and not computed; everything before it is both.
            num_computed = request.num_prompt_tokens + num_outputs - 1
            self._publish(request, num_computed // self._block_size - 1)
            request.next_block_at += self._block_size
            request.outputs_until = min(request.max_tokens, request.next_block_at)
        if num_outputs >= request.max_tokens or token_id in request.stop_ids:
            finish_reason, stop_token_id = request.ending(token_id)
            if finish_reason is not None:
                request.finish_reason = finish_reason
                self._unbind(request)
                endings.append(Ending(request, finish_reason, stop_token_id))

    def _publish(self, request: Request, index: int) -> None:
        self.prefix_cache.publish(request.block_ids[index], request.block_key(index, self._block_size))

    def _fail(self, request: Request) -> Ending:
        """Ends a request whose numbers are not finite, and everything that may rest on what it wrote.

        Blocks that it wrote are not offered any more. Requests that hit one of them start again in front of the queue,
        and what they wrote is not offered either. Who hit a block of theirs hit the first one too, as a hit has no gap.
        """
        tainted = self._withdraw(request)
        self._unbind(request)
        request.finish_reason = FinishReason.ERROR
        restarted = []
        for reader in list(self.requests.values()):
            if not tainted.isdisjoint(reader.block_ids[: reader.num_hit_blocks]):
                self._withdraw(reader)
                self._unbind(reader)
                restarted.append(reader.continuation())
        for again in reversed(restarted):
            self.waiting.appendleft(again)
        return Ending(request, FinishReason.ERROR, error=ErrorReason.NUMERIC_ERROR)

    def _withdraw(self, request: Request) -> set[int]:
        """Takes the blocks that a request wrote out of the prefix index. Returns them."""
        written = set(request.block_ids[request.num_hit_blocks :])
        for block_id in written:
            self.block_pool.forget(block_id)
        return written
