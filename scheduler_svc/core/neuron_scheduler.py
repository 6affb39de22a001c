"""The holdback queue, prefill apart from decode, padding and the state machine, on top of `Scheduler`.

The hardware runs compiled graphs of fixed shapes and never prefill and decode in one batch. So the base scheduler is
shown a part of the queues only: what may not run now is held back, the base schedules the rest, and everything is put
back. A prefill comes before decodes; one request prefills at a time.

Between steps everything queued is in `waiting`. Inside `schedule()` that queue is `holdback_queue`, and `waiting` has
what `can_schedule` let through. The two are swapped, not copied: the head decides, and the cost of a step does not grow
with what waits (K9).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from holdback.buckets import get_bucket_for_count
from holdback.errors import ConfigError, InternalError
from holdback.types import ModelRunnerOutput, Phase, SchedulerOutput, SchedulerState
from scheduler_svc.core.admission import AdmissionPolicy, MaxModelLenAdmission, ReservedAdmission
from scheduler_svc.core.checks import Check, HeldBack
from scheduler_svc.core.config import KvAdmission, SchedulerConfig
from scheduler_svc.core.output import Batch, StepRecord
from scheduler_svc.core.phased import PhasedAdmission
from scheduler_svc.core.queue import RequestQueue, WaitingQueue
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.stall import DecodeStall, ExpectedTime


class NeuronScheduler(Scheduler):
    """Decides the steps of one Neuron executor.

    Attributes:
        holdback_queue: inside `schedule()`, the queue behind what was let through; empty between steps.
        admission: the rule of admission by KV memory.
        num_batched_tokens_buckets: prefill shapes, tokens, ascending.
        total_padding_tokens: running sum of padded minus scheduled tokens.
        state: IDLE, ACTIVE_PREFILL or ACTIVE_DECODE, as the last `schedule()` left it (K5).
        max_prefills_per_batch: requests that prefill at once (K12).

    Args:
        waiting: the queue; one of its own if None.
        expected_time: of the executor's graphs; `max_decode_stall_ms` needs it.

    Raises:
        ConfigError: `max_decode_stall_ms` is set and `expected_time` is not.
    """

    max_prefills_per_batch: ClassVar[int] = 1

    def __init__(
        self,
        config: SchedulerConfig,
        waiting: WaitingQueue | None = None,
        expected_time: ExpectedTime | None = None,
    ) -> None:
        if config.max_decode_stall_ms is not None and expected_time is None:
            raise ConfigError(f"max_decode_stall_ms is {config.max_decode_stall_ms}; allowed without latencies: null")
        super().__init__(config, waiting)
        self._let_through = RequestQueue()
        self.holdback_queue: WaitingQueue = self._let_through
        self.num_batched_tokens_buckets = config.prefill_buckets
        self.total_padding_tokens = 0
        self.state = SchedulerState.IDLE
        self._expected_time = expected_time

    def _forget_executor(self) -> None:
        super()._forget_executor()
        self.admission = self._new_admission()
        max_ms = self.config.max_decode_stall_ms
        self._stall = DecodeStall(None if max_ms is None else int(max_ms * 1000))

    def _new_admission(self) -> AdmissionPolicy:
        match self.config.kv_admission:
            case KvAdmission.MAX_MODEL_LEN:
                return MaxModelLenAdmission(self.config)
            case KvAdmission.RESERVED:
                return ReservedAdmission(self.config)
            case KvAdmission.PHASED:
                num_late_steps = self.max_steps_in_flight - 1
                return PhasedAdmission(self.config, self.block_pool, self._hits, num_late_steps=num_late_steps)

    # ---- admission ----

    @property
    def at_capacity(self) -> bool:
        return len(self.running) >= self.max_num_seqs

    @property
    def has_prefill_in_running(self) -> bool:
        """New prefills go in front (K6) and nobody joins while one is there, so only the front can be prefilling."""
        running = self.running
        if not running:
            return False
        return any(map(self._is_prefill_request, running[: self.max_prefills_per_batch]))

    @property
    def max_kv_concurrent(self) -> int:
        """K1's number: requests of `max_model_len` that KV memory holds; not cut to `max_num_seqs`."""
        return self.config.max_kv_concurrent

    @property
    def num_peak_blocks(self) -> int:
        """Most blocks that the running requests may come to hold at once, by the rule of admission; for people."""
        return self.admission.peak_blocks(self.running)

    def _is_prefill_request(self, request: Request) -> bool:
        return request.is_prefill

    def can_schedule(self, request: Request) -> bool:
        """Whether the head of the queue may be bound by the next `schedule()`."""
        return self.why_not(request) is None

    def why_not(self, request: Request) -> str | None:
        """Why `request` is refused now, in words with the numbers; None when it can be scheduled."""
        held_back = self.held_back_by(request)
        return None if held_back is None else held_back.why

    def held_back_by(self, request: Request) -> HeldBack | None:
        """The first check that refuses `request` now; None when it can be scheduled."""
        num_running = len(self.running)
        if num_running >= self.max_num_seqs:
            return HeldBack(Check.SLOTS, f"{num_running} requests run; max_num_seqs is {self.max_num_seqs}")
        if self.has_prefill_in_running:
            prefill = next(filter(self._is_prefill_request, self.running))
            done = f"{prefill.num_computed_tokens} of {prefill.num_prefill_tokens} tokens"
            why = f"request {prefill.spec.request_id!r} is prefilling, {done} are computed"
            return HeldBack(Check.PREFILL, why)
        if len(self._let_through) >= self.max_prefills_per_batch:
            why = f"{len(self._let_through)} prefill is in this batch; allowed: {self.max_prefills_per_batch}"
            return HeldBack(Check.PREFILL, why)
        if (why_not := self.admission.why_not(request, self.running)) is not None:
            return HeldBack(Check.KV_ADMISSION, why_not)
        if (why_not := self._why_not_placed(request)) is not None:
            return HeldBack(Check.KV_BLOCKS, why_not)
        if (why_not := self._why_decode_first(request)) is not None:
            return HeldBack(Check.DECODE_FIRST, why_not)
        return None

    def _why_decode_first(self, request: Request) -> str | None:
        """Whether a decode step must come before `request` is bound, for its first chunk would make the stall too long.

        Asked last, as it makes no difference to a head that does not fit.
        """
        if self._stall.max_us is None or not self._stall.num_prefill_steps:
            return None
        if not self._is_decode_due(request, self.num_hit_tokens(request)):
            return None
        stall_us, max_ms = self._stall.stall_us, self.config.max_decode_stall_ms
        return f"a decode step comes first, prefills have taken {stall_us} us; max_decode_stall_ms is {max_ms:g}"

    def _is_decode_due(self, prefill: Request, num_computed: int) -> bool:
        """Whether a decode step comes before the chunk of `prefill` that starts at `num_computed`."""
        num_tokens = min(prefill.num_prefill_tokens - num_computed, self.config.max_num_batched_tokens)
        next_us = self._expected_us(self._calculate_padded_count(num_tokens), num_computed)
        return self._stall.would_pass_bound(next_us) and self._can_decode(self.running)

    def _expected_us(self, num_padded: int, num_computed: int) -> int:
        if self._expected_time is None:
            return 0
        return self._expected_time(Phase.PREFILL, num_padded, num_computed)

    def _can_decode(self, requests: Iterable[Request]) -> bool:
        """Whether a decode step of `requests` would have a row."""
        return any(request.num_steps_left and not request.is_prefill for request in requests)

    @property
    def max_stall_us(self) -> int:
        """The longest that a request that could have decoded has waited for prefills, measured device time."""
        return self._stall.max_stall_us

    # ---- schedule ----

    def schedule(self) -> SchedulerOutput:
        self._hold_back()
        hidden = self._separate()
        try:
            scheduler_output = self._call_base_schedule()
        finally:
            self._restore(hidden)
        self._apply_padding_and_log_stats(scheduler_output)
        self._count_step(scheduler_output, hidden)
        self._update_state(scheduler_output)
        return scheduler_output

    def _call_base_schedule(self) -> SchedulerOutput:
        return Scheduler.schedule(self)

    def _hold_back(self) -> None:
        """Steps 1 and 2: holds the queue back and lets its head through as far as `can_schedule` says."""
        self.waiting, self.holdback_queue = self._let_through, self.waiting
        request = self.holdback_queue.peek()
        while request is not None and self.can_schedule(request):
            self.waiting.append(self.holdback_queue.popleft())
            request = self.holdback_queue.peek()

    def _separate(self) -> list[Request]:
        """Step 3: hides what may not share the batch: decodes from a prefill, or a prefill from decodes. Returns it."""
        running = self.running
        if self.has_prefill_in_running:
            # It is in front, as new prefills go there and nobody joins meanwhile.
            prefills, decodes = running[: self.max_prefills_per_batch], running[self.max_prefills_per_batch :]
            if self._is_decode_due(prefills[0], prefills[0].num_computed_tokens):
                self.running = decodes
                return prefills
            self.running = prefills
            return decodes
        if self.waiting:
            self.running = []
            return running
        return []

    def _restore(self, hidden: list[Request]) -> None:
        """Step 5: prefills stand in front of decodes, whichever was hidden (K6); what was not taken goes back."""
        if hidden:
            self.running = hidden + self.running if hidden[0].is_prefill else self.running + hidden
        queue = self.holdback_queue
        if self._let_through:
            for request in reversed(list(self._let_through)):
                self._let_through.remove(request.req_id)
                queue.appendleft(request)
        self.waiting, self.holdback_queue = queue, self._let_through

    def _calculate_padded_count(self, token_count: int) -> int:
        """The smallest prefill bucket that holds `token_count`; 0 for 0."""
        if token_count == 0:
            return 0
        return get_bucket_for_count(token_count, self.num_batched_tokens_buckets)

    def _apply_padding_and_log_stats(self, scheduler_output: SchedulerOutput) -> None:
        """Steps 6 and 7: tensor sizes of a prefill, apart from the scheduled counts; decode rows are not padded.

        Raises:
            RuntimeError: prefill and decode are in one batch.
        """
        if scheduler_output.phase is not Phase.PREFILL:
            return
        num_scheduled = scheduler_output.num_scheduled_tokens
        num_prefill_rows = self._steps[-1].num_prefill_rows
        if num_prefill_rows != len(num_scheduled):
            raise RuntimeError(
                f"a batch of {num_prefill_rows} prefill rows and {len(num_scheduled) - num_prefill_rows} decode rows;"
                " the hardware runs one kind at a time"
            )
        padded = {req_id: self._calculate_padded_count(count) for req_id, count in num_scheduled.items()}
        scheduler_output.num_scheduled_tokens_padded = padded
        self.total_padding_tokens += sum(padded.values()) - sum(num_scheduled.values())

    def _count_step(self, scheduler_output: SchedulerOutput, hidden: list[Request]) -> None:
        """Tells who follows the steps of the lane."""
        if scheduler_output.phase is Phase.DECODE:
            self.admission.count_decode_step(len(scheduler_output.num_scheduled_tokens))
            self._stall.add_decode_step()
        elif scheduler_output.phase is Phase.PREFILL:
            ((req_id, num_padded),) = scheduler_output.num_scheduled_tokens_padded.items()
            num_computed = self.requests[req_id].num_computed_tokens - scheduler_output.num_scheduled_tokens[req_id]
            expected_us = self._expected_us(num_padded, num_computed)
            self._stall.add_prefill_step(scheduler_output.step, expected_us, hides_decode=self._can_decode(hidden))

    def _update_state(self, scheduler_output: SchedulerOutput) -> None:
        """Step 8, from what the output says: counters of the requests are already past this step."""
        if not self.running and not self.waiting:
            self.state = SchedulerState.IDLE
        elif scheduler_output.phase is Phase.PREFILL:
            self.state = SchedulerState.ACTIVE_PREFILL
        elif scheduler_output.phase is Phase.DECODE:
            self.state = SchedulerState.ACTIVE_DECODE

    def sampling_rows(self, step: int) -> Sequence[Request]:
        """Who samples in a step in flight, in schedule order; empty where no such step runs a request."""
        return next((record.sampling_rows for record in self._steps if record.step == step), ())

    # ---- what others must be told of ----

    def _bind(self, request: Request, batch: Batch) -> None:
        self.admission.bind(request)
        super()._bind(request, batch)

    def _prefill(self, request: Request, num_tokens: int, batch: Batch) -> list[int]:
        new_block_ids = super()._prefill(request, num_tokens, batch)
        if not request.is_prefill:
            self.admission.start_decode(request)
        return new_block_ids

    def _unbind(self, request: Request) -> None:
        if request.slot is not None:
            self.admission.release(request)
        super()._unbind(request)

    def _take_record(self, step: int, runner_output: ModelRunnerOutput) -> StepRecord:
        record = super()._take_record(step, runner_output)
        if record.num_prefill_rows:
            self._stall.measure(step, runner_output.timings.device_us)
        return record

    # ---- what must always hold ----

    def check_integrity(self) -> None:
        """Compares everything that must balance; for tests, and for a lane that goes idle.

        Raises:
            InternalError: blocks, slots, ids or counters do not add up.
        """
        self.block_pool.check_integrity((request, request.block_ids) for request in self.running)
        bound = [request.req_id for request in self.running]
        queued = [request.req_id for request in self.waiting]
        if sorted(bound) != sorted(self.requests) or len(set(bound + queued)) != len(bound + queued):
            raise InternalError(f"running {bound}, bound {sorted(self.requests)}, waiting {queued}: not one place each")
        slots = [request.slot for request in self.running]
        if sorted([*slots, *self._free_slots], key=str) != sorted(range(self.max_num_seqs), key=str):
            raise InternalError(f"slots {slots} are taken and {self._free_slots} free of {self.max_num_seqs}")
        if len(self.holdback_queue):
            raise InternalError(f"{len(self.holdback_queue)} requests are held back between steps")
        for position, request in enumerate(self.running):
            self._check_request(position, request)
        self.admission.check_integrity(self.running)

    def _check_request(self, position: int, request: Request) -> None:
        capacity = len(request.block_ids) * self.config.block_size
        if not capacity - self.config.block_size < request.num_computed_tokens <= capacity:
            raise InternalError(f"{request!r} has {len(request.block_ids)} blocks of {self.config.block_size}")
        if not 0 <= request.num_output_placeholders <= len(self._steps):
            raise InternalError(f"{request!r} waits for {request.num_output_placeholders} of {len(self._steps)} steps")
        if not request.is_prefill and not request.num_steps_left and not request.num_output_placeholders:
            raise InternalError(f"{request!r} has all its tokens and still has its slot")
        if request.is_prefill and position >= self.max_prefills_per_batch:
            raise InternalError(f"{request!r} prefills at position {position} of running")
