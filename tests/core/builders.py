"""Builders with every knob defaulted, and a drive that runs a scheduler with an executor of arithmetic.

Sizes are tiny: blocks of 4 tokens, prompts of a few tokens. Output i of every request is token 50 + i unless a test
plans otherwise, so expected answers can be written down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from holdback.types import FinishReason, ModelRunnerOutput, Phase, RequestSpec, SamplingParams, SchedulerOutput
from scheduler_svc.core.admission import AdmissionPolicy
from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.config import KvAdmission
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from scheduler_svc.core.output import RequestUpdate
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler, SchedulerConfig

EOS = 2
FIRST_OUTPUT = 50

SCHEDULERS = [NeuronScheduler, NeuronAsyncScheduler]


def build_config(**changes: Any) -> SchedulerConfig:
    """64 usable blocks of 4 tokens: four requests of 64 tokens; buckets 8, 16, 32."""
    sizes: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 65,
        "num_batched_tokens_buckets": (8, 16, 32),
    }
    if {"max_num_batched_tokens", "max_model_len"} & changes.keys():
        sizes["num_batched_tokens_buckets"] = None
    return SchedulerConfig(**{**sizes, **changes})


def build_request(
    req_id: str = "r",
    prompt: int | Sequence[int] = 5,
    max_tokens: int = 8,
    outputs: Sequence[int] = (),
    salt: str = "",
    **sampling: Any,
) -> Request:
    """A request; a prompt given as a number is that many tokens from 100 on, so equal numbers share a prefix."""
    token_ids = tuple(range(100, 100 + prompt)) if isinstance(prompt, int) else tuple(prompt)
    spec = RequestSpec(
        req_id,
        token_ids,
        SamplingParams(max_tokens=max_tokens, **sampling),
        output_token_ids=tuple(outputs),
        cache_salt=salt,
    )
    return Request(req_id, spec, (EOS,))


class AdmitAll(AdmissionPolicy):
    """No rule of KV memory, so that K3 alone can refuse."""

    def why_not(self, request: Request, running: Sequence[Request]) -> str | None:
        return None


class PaperExecutor:
    """Runs steps as a device would, knowing only what the outputs say.

    In place of keys and values it writes, for each position, a number that depends on all tokens up to there. A row
    must find the right number at each of its earlier positions, so a wrong block table, a hit on a block with other
    content or a late write into a block of somebody else is seen.
    """

    def __init__(self, block_size: int, planned: Mapping[tuple[str, int], int]) -> None:
        self.planned = planned
        self._block_size = block_size
        self._memory: dict[tuple[int, int], int] = {}
        self._tokens: dict[str, list[int]] = {}
        self._block_tables: dict[str, list[int]] = {}
        self._num_prompt: dict[str, int] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for req_id in output.finished_req_ids:
            self._block_tables.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self._block_tables, "told twice"
            self._block_tables[new.req_id] = list(new.block_ids)
            self._tokens[new.req_id] = [*new.spec.prompt_token_ids, *new.spec.output_token_ids]
            self._num_prompt[new.req_id] = len(new.spec.prompt_token_ids)
        cached = output.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._block_tables[req_id] += block_ids or []
        sampled = []
        for req_id, num_computed in num_computed_tokens(output).items():
            end = num_computed + output.num_scheduled_tokens[req_id]
            self._run_row(req_id, num_computed, end)
            if end == len(self._tokens[req_id]):
                sampled.append(self._sample(req_id))
        return ModelRunnerOutput(output.step, sampled)

    def _run_row(self, req_id: str, start: int, end: int) -> None:
        assert end <= len(self._tokens[req_id]), "computes a token that is not known"
        content = 0
        for position in range(end):
            content = hash((content, self._tokens[req_id][position]))
            place = self._block_tables[req_id][position // self._block_size], position % self._block_size
            assert place[0] != 0, "the null block holds nothing"
            if position >= start:
                self._memory[place] = content
            assert self._memory.get(place) == content, f"{req_id} finds other content at position {position}"

    def _sample(self, req_id: str) -> int:
        index = len(self._tokens[req_id]) - self._num_prompt[req_id]
        token_id = self.planned.get((req_id, index), FIRST_OUTPUT + index)
        self._tokens[req_id].append(token_id)
        return token_id


class Drive:
    """Steps a scheduler: `schedule()`, the answer, and the update once as many steps are in flight as it allows.

    After every step everything must balance, and a scheduler with work and nothing in flight must have scheduled
    something.

    Attributes:
        planned: (req_id, output index) to the token sampled there.
        outputs: all tokens of each request, from the updates.
        finished: why each request ended, from the updates.
    """

    def __init__(self, scheduler: NeuronScheduler, planned: Mapping[tuple[str, int], int] | None = None) -> None:
        self.scheduler = scheduler
        self.planned = dict(planned or {})
        self.executor = PaperExecutor(scheduler.config.block_size, self.planned)
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def add(self, req_id: str = "r", *arguments: Any, **knobs: Any) -> Request:
        request = build_request(req_id, *arguments, **knobs)
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> SchedulerOutput:
        had_nothing_in_flight = self.scheduler.num_steps_in_flight == 0
        output = self.scheduler.schedule()
        if had_nothing_in_flight and (self.scheduler.running or self.scheduler.waiting):
            assert output.total_num_scheduled_tokens >= 1
        self.in_flight.append((output, self.executor.execute(output)))
        self.scheduler.check_integrity()
        return output

    def update(self, **changes: Any) -> list[RequestUpdate]:
        """Applies the oldest result in flight; `changes` replace its fields."""
        output, result = self.in_flight.popleft()
        for name, value in changes.items():
            setattr(result, name, value)
        updates = list(self.scheduler.update_from_output(output, result))
        self.scheduler.check_integrity()
        for update in updates:
            tokens = self.outputs.setdefault(update.req_id, [])
            assert update.output_index == len(tokens), "a token twice, or a gap"
            tokens += update.new_token_ids
            if update.finish_reason is not None:
                assert update.req_id not in self.finished, "ended twice"
                self.finished[update.req_id] = update.finish_reason
        return updates

    def lose_lane(self) -> list[Request]:
        """The executor is gone with what was in flight; another one takes its place."""
        released = self.scheduler.release_all()
        self.in_flight.clear()
        self.executor = PaperExecutor(self.scheduler.config.block_size, self.planned)
        self.scheduler.check_integrity()
        return released

    def step(self) -> SchedulerOutput:
        while self.scheduler.num_steps_in_flight >= self.scheduler.max_steps_in_flight:
            self.update()
        output = self.schedule()
        if len(self.in_flight) >= self.scheduler.max_steps_in_flight:
            self.update()
        return output

    def run(self, num_steps: int) -> list[SchedulerOutput]:
        return [self.step() for _ in range(num_steps)]

    def run_until_idle(self, max_steps: int = 500) -> list[SchedulerOutput]:
        """Steps until nothing runs, waits or is in flight."""
        steps: list[SchedulerOutput] = []
        for _ in range(max_steps):
            if not (self.scheduler.running or self.scheduler.waiting or self.in_flight):
                return steps
            steps.append(self.step())
            if not (self.scheduler.running or self.scheduler.waiting):
                while self.in_flight:
                    self.update()
        raise AssertionError(f"still busy after {max_steps} steps: {self.scheduler.running}")


def build_drive(
    scheduler_class: type[NeuronScheduler] = NeuronScheduler,
    planned: Mapping[tuple[str, int], int] | None = None,
    **changes: Any,
) -> Drive:
    return Drive(scheduler_class(build_config(**changes), expected_time=one_us_per_token), planned)


def build_phased(scheduler_class: type[NeuronScheduler] = NeuronScheduler, **changes: Any) -> Any:
    """A drive that lets requests in by their peak over time; of no type, as tests look into its policy."""
    return build_drive(scheduler_class, kv_admission=KvAdmission.PHASED, **changes)


def one_us_per_token(phase: Phase, size: int, context: int) -> int:
    """Device time of a graph that a test can work out: 1 µs for each token of the bucket, whatever the context."""
    return size


def num_computed_tokens(output: SchedulerOutput) -> dict[str, int]:
    """req_id to tokens computed before the step, in schedule order."""
    cached = output.scheduled_cached_reqs
    counts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    counts.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
    return counts


def ids(requests: Any) -> list[str]:
    return [request.req_id for request in requests]


def force_eviction(scheduler: Scheduler, request: Request, index: int) -> None:
    """The content of one free cached block is lost, as if the block had been handed out again and returned."""
    block_id = scheduler.prefix_cache.find(request.block_key(index, scheduler.config.block_size))
    assert block_id is not None
    scheduler.block_pool.forget(block_id)
