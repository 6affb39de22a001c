"""The holdback queue, prefill apart from decode, padding and the state machine, on top of `Scheduler`.

The hardware runs compiled graphs of fixed shapes and never prefill and decode in one batch. So the base scheduler is
shown a part of the queues only: what may not run now is held back, the base schedules the rest, and everything is put
back. A prefill comes before decodes; one request prefills at a time.

Between steps everything queued is in `waiting`. Inside `schedule()` that queue is `holdback_queue`, and `waiting` has
what `can_schedule` let through. The two are swapped, not copied: the head decides, and the cost of a step does not grow
with what waits (K9).
"""

from __future__ import annotations

from typing import ClassVar

from holdback.buckets import get_bucket_for_count
from holdback.errors import InternalError
from holdback.types import Phase, SchedulerOutput, SchedulerState
from scheduler_svc.core.admission import AdmissionPolicy, MaxModelLenAdmission
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.queue import RequestQueue, WaitingQueue
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler


class NeuronScheduler(Scheduler):
    """Decides the steps of one Neuron executor.

    Attributes:
        holdback_queue: inside `schedule()`, the queue behind what was let through; empty between steps.
        admission: the rule of admission by KV memory.
        num_batched_tokens_buckets: prefill shapes, tokens, ascending.
        total_padding_tokens: running sum of padded minus scheduled tokens.
        state: IDLE, ACTIVE_PREFILL or ACTIVE_DECODE, as the last `schedule()` left it (K5).
        max_prefills_per_batch: requests that prefill at once (K12).
    """

    max_prefills_per_batch: ClassVar[int] = 1

    def __init__(self, config: SchedulerConfig, waiting: WaitingQueue | None = None) -> None:
        super().__init__(config, waiting)
        self._let_through = RequestQueue()
        self.holdback_queue: WaitingQueue = self._let_through
        self.admission: AdmissionPolicy = MaxModelLenAdmission(config.max_kv_concurrent)
        self.num_batched_tokens_buckets = config.prefill_buckets
        self.total_padding_tokens = 0
        self.state = SchedulerState.IDLE

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

    def _is_prefill_request(self, request: Request) -> bool:
        return request.is_prefill

    def can_schedule(self, request: Request) -> bool:
        """Whether the head of the queue may be bound by the next `schedule()`."""
        return self.why_not(request) is None

    def why_not(self, request: Request) -> str | None:
        """The first check that refuses `request` now, in words with its numbers; None when it can be scheduled."""
        num_running = len(self.running)
        if num_running >= self.max_num_seqs:
            return f"{num_running} requests run; max_num_seqs is {self.max_num_seqs}"
        if self.has_prefill_in_running:
            prefill = next(filter(self._is_prefill_request, self.running))
            done = f"{prefill.num_computed_tokens} of {prefill.num_prefill_tokens} tokens"
            return f"request {prefill.req_id!r} is prefilling, {done} are computed"
        if len(self._let_through) >= self.max_prefills_per_batch:
            return f"{len(self._let_through)} prefill is in this batch; allowed: {self.max_prefills_per_batch}"
        return self.admission.why_not(request, self.running) or self._why_not_placed(request)

    # ---- schedule ----

    def schedule(self) -> SchedulerOutput:
        self._hold_back()
        running_holdback = self._separate()
        try:
            scheduler_output = self._call_base_schedule()
        finally:
            self._restore(running_holdback)
        self._apply_padding_and_log_stats(scheduler_output)
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
        """Step 3: hides what may not share the batch with a prefill. Returns it."""
        running = self.running
        if self.has_prefill_in_running:
            self.running = [request for request in running if request.is_prefill]
            return [request for request in running if not request.is_prefill]
        if self.waiting:
            self.running = []
            return running
        return []

    def _restore(self, running_holdback: list[Request]) -> None:
        """Step 5: what was hidden comes behind what was scheduled (K6); what was not taken goes back to the front."""
        if running_holdback:
            self.running = self.running + running_holdback
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

    def _update_state(self, scheduler_output: SchedulerOutput) -> None:
        """Step 8, from what the output says: counters of the requests are already past this step."""
        if not self.running and not self.waiting:
            self.state = SchedulerState.IDLE
        elif scheduler_output.phase is Phase.PREFILL:
            self.state = SchedulerState.ACTIVE_PREFILL
        elif scheduler_output.phase is Phase.DECODE:
            self.state = SchedulerState.ACTIVE_DECODE

    # ---- the end of a lane, and what must always hold ----

    def check_integrity(self) -> None:
        """Compares everything that must balance; for tests, and for a lane that goes idle.

        Raises:
            InternalError: blocks, slots, ids or counters do not add up.
        """
        self.block_pool.check_integrity(request.block_ids for request in self.running)
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

    def _check_request(self, position: int, request: Request) -> None:
        capacity = len(request.block_ids) * self.config.block_size
        if not capacity - self.config.block_size < request.num_computed_tokens <= capacity:
            raise InternalError(f"{request!r} has {len(request.block_ids)} blocks of {self.config.block_size}")
        if not 0 <= request.num_output_placeholders <= len(self._steps):
            raise InternalError(f"{request!r} waits for {request.num_output_placeholders} of {len(self._steps)} steps")
        if request.is_prefill and position >= self.max_prefills_per_batch:
            raise InternalError(f"{request!r} prefills at position {position} of running")
