"""Parts for the scheduler service's tests: a clock turned by hand, an executor that answers by arithmetic, and a
gateway's memory that refuses a token given twice or left out."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdback.errors import HoldbackError
from holdback.types import (
    ExecutorInfo,
    ExecutorLimits,
    GraphLatency,
    ModelInfo,
    ModelRunnerOutput,
    Phase,
    RequestSpec,
    SamplingParams,
    SchedulerOutput,
)
from holdback.v1 import errors_pb2, scheduler_pb2, types_pb2
from scheduler_svc.clock import Clock
from scheduler_svc.config import SchedulerServiceConfig
from scheduler_svc.dispatcher import Dispatcher
from scheduler_svc.lane import Lane
from scheduler_svc.outbox import Outbox
from scheduler_svc.pool import Pool
from scheduler_svc.request_traces import RequestTraces
from scheduler_svc.requests import Resubmission, Session

EOS = 2
VOCAB_SIZE = 128


def answer_of(prompt: Sequence[int], num_tokens: int, *, start: int = 0) -> list[int]:
    """Outputs `start` to `num_tokens` - 1 that every executor here gives: 16 + (sum of the prompt + 3 i) % 100."""
    return [16 + (sum(prompt) + 3 * i) % 100 for i in range(start, num_tokens)]


def prompt_of(number: int) -> list[int]:
    """A prompt of its own for each number, with answers of its own."""
    return [20 + number, 21, 22]


def build_info(
    executor_id: str = "executor-0",
    *,
    fingerprint: str = "model",
    max_model_len: int = 64,
    block_size: int = 4,
    num_blocks: int = 65,
    max_num_seqs: int = 4,
    prefill_buckets: Sequence[int] = (8, 16),
    prefill_us: int = 100,
    decode_us: int = 10,
    max_steps_in_flight: int = 2,
    vocab_size: int = VOCAB_SIZE,
    lease: str = "a lease of 16 to 64 bytes",
    port: int = 1,
    advertise_address: str = "",
) -> ExecutorInfo:
    """Four requests of 64 tokens fit: 64 usable blocks of 4."""
    seqs_buckets = (max_num_seqs,)
    return ExecutorInfo(
        executor_id=executor_id,
        lease=lease,
        port=port,
        model=ModelInfo(fingerprint, "tiny", vocab_size, (EOS,), max_model_len),
        limits=ExecutorLimits(
            block_size=block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=prefill_buckets[-1],
            num_batched_tokens_buckets=tuple(prefill_buckets),
            num_seqs_buckets=seqs_buckets,
            max_steps_in_flight=max_steps_in_flight,
        ),
        latencies=(
            *(GraphLatency(Phase.PREFILL, size, 0, prefill_us) for size in prefill_buckets),
            *(GraphLatency(Phase.DECODE, size, max_model_len, decode_us) for size in seqs_buckets),
        ),
        advertise_address=advertise_address,
        device="simulated",
    )


def build_spec(
    request_id: str = "r",
    prompt: Sequence[int] = (20, 21, 22),
    *,
    max_tokens: int = 3,
    stop: Sequence[int] = (),
    outputs: Sequence[int] = (),
    generation: int = 0,
    deadline_ms: int | None = None,
    queued_ms: int = 0,
    priority: int = 0,
    num_logprobs: int | None = None,
) -> RequestSpec:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop), num_logprobs=num_logprobs)
    return RequestSpec(
        request_id,
        list(prompt),
        sampling,
        generation=generation,
        output_token_ids=list(outputs),
        deadline_ms=deadline_ms,
        queued_ms=queued_ms,
        priority=priority,
    )


@dataclass
class _Timer:
    when: float
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class ManualClock(Clock):
    """Time stands still until `advance`."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._timers: list[tuple[float, int, _Timer]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self._now

    def unix_us(self) -> int:
        return round(self._now * 1e6)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> _Timer:
        timer = _Timer(self._now + delay_s, callback)
        heapq.heappush(self._timers, (timer.when, next(self._numbers), timer))
        return timer

    def stall(self, seconds: float) -> None:
        """Time passes while the process is busy: timers that are due ring with the next `advance`."""
        self._now += seconds

    def advance(self, seconds: float) -> None:
        until = self._now + seconds
        while self._timers and self._timers[0][0] <= until:
            when, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            if not timer.is_cancelled:
                timer.callback()
        self._now = until


class Executor(Protocol):
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput: ...


class ArithmeticExecutor:
    """Runs steps as an executor must: keeps what it was told, refuses what does not follow, answers by `answer_of`."""

    def __init__(self) -> None:
        self._specs: dict[str, RequestSpec] = {}
        self._num_computed: dict[str, int] = {}
        self._num_outputs: dict[str, int] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for req_id in output.finished_req_ids:
            del self._specs[req_id], self._num_computed[req_id], self._num_outputs[req_id]
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self._specs
            self._specs[new.req_id] = new.spec
            self._num_computed[new.req_id] = new.num_computed_tokens
            self._num_outputs[new.req_id] = len(new.spec.output_token_ids)
        cached = output.scheduled_cached_reqs
        for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            assert num_computed == self._num_computed[req_id]
        tokens: list[int] = []
        for req_id in [*cached.req_ids, *(new.req_id for new in output.scheduled_new_reqs)]:
            tokens += self._run(req_id, output.num_scheduled_tokens[req_id])
        return ModelRunnerOutput(output.step, tokens)

    def _run(self, req_id: str, num_tokens: int) -> list[int]:
        spec = self._specs[req_id]
        self._num_computed[req_id] += num_tokens
        if self._num_computed[req_id] < len(spec.prompt_token_ids) + len(spec.output_token_ids):
            return []
        index = self._num_outputs[req_id]
        self._num_outputs[req_id] += 1
        return answer_of(spec.prompt_token_ids, index + 1, start=index)


@dataclass
class Answer:
    """What a gateway knows of one handle."""

    tokens: list[int] = field(default_factory=list)
    logprob_token_ids: list[int] = field(default_factory=list)
    started: list[scheduler_pb2.RequestStarted] = field(default_factory=list)
    ended: scheduler_pb2.RequestEnded | None = None

    @property
    def finish_reason(self) -> str:
        assert self.ended is not None
        return types_pb2.FinishReason.Name(self.ended.finish_reason).removeprefix("FINISH_REASON_").lower()

    @property
    def error_reason(self) -> str:
        assert self.ended is not None
        return errors_pb2.ErrorReason.Name(self.ended.error.reason).removeprefix("ERROR_REASON_")


class Answers:
    """Reads a gateway's messages; fails on a token twice, a gap, and anything after an end."""

    def __init__(self) -> None:
        self.by_handle: dict[int, Answer] = {}
        self.pools: list[scheduler_pb2.PoolStatus] = []
        self.updates: list[scheduler_pb2.RequestUpdates] = []
        self.started_order: list[int] = []
        self.num_known: dict[int, int] = {}

    def __getitem__(self, handle: int) -> Answer:
        return self.by_handle.setdefault(handle, Answer())

    def read(self, response: scheduler_pb2.ConnectResponse) -> None:
        if response.HasField("pool"):
            self.pools.append(response.pool)
            return
        if response.HasField("heartbeat"):
            return
        updates = response.updates
        self.updates.append(updates)
        for started in updates.started:
            assert self[started.handle].ended is None
            if not self[started.handle].started:
                self.started_order.append(started.handle)
            self[started.handle].started.append(started)
        self._read_tokens(updates)
        for ended in updates.ended:
            assert self[ended.handle].ended is None
            self[ended.handle].ended = ended

    def _read_tokens(self, updates: scheduler_pb2.RequestUpdates) -> None:
        counts = list(updates.num_new_tokens) or [1] * len(updates.handles)
        token_ids, owners = iter(updates.token_ids), []
        for handle, index, count in zip(updates.handles, updates.output_indices, counts, strict=True):
            answer = self[handle]
            assert answer.ended is None
            assert index == len(answer.tokens) + self.num_known.get(handle, 0)
            answer.tokens += itertools.islice(token_ids, count)
            owners += [answer] * count
        assert next(token_ids, None) is None
        for entry in updates.logprobs:
            assert entry.logprobs.token_id == updates.token_ids[entry.token_index]
            owners[entry.token_index].logprob_token_ids.append(entry.logprobs.token_id)


class SimulatedLane:
    """A lane on an executor of this process. It answers each step at once, or when told if it is `stepped`."""

    def __init__(
        self, simulation: Simulation, info: ExecutorInfo, *, is_stepped: bool, executor: Executor | None
    ) -> None:
        self.executor = executor or ArithmeticExecutor()
        self.sent: list[SchedulerOutput] = []
        self.unanswered: deque[SchedulerOutput] = deque()
        self._is_stepped = is_stepped
        self._dispatcher = simulation.dispatcher
        self.lane = Lane(
            info,
            simulation.dispatcher.new_lane_queue(),
            self,
            simulation.dispatcher,
            simulation.config,
            simulation.clock,
        )
        self._task = asyncio.ensure_future(self._run())
        simulation.dispatcher.add_lane(self.lane)

    async def _run(self) -> None:
        """As a registration does."""
        is_lost = True
        try:
            await self.lane.run()
            is_lost = False
        finally:
            self._dispatcher.remove_lane(self.lane, is_lost=is_lost)

    async def send(self, output: SchedulerOutput) -> None:
        self.sent.append(output)
        self.unanswered.append(output)
        if not self._is_stepped:
            asyncio.get_running_loop().call_soon(self.answer)

    def answer(self) -> None:
        """Runs the oldest step sent; when the lane has ended meanwhile, nobody hears of it."""
        self.lane.receive(self.executor.execute(self.unanswered.popleft()))

    async def step(self) -> SchedulerOutput:
        """Answers the step that is out, and waits for what follows. Returns the step answered."""
        output = self.unanswered[0]
        self.answer()
        await settle()
        return output

    async def lose(self, error: HoldbackError) -> None:
        """The executor dies."""
        self.lane.fail(error)
        await asyncio.wait({self._task})

    async def ended(self) -> BaseException | None:
        """Waits for the lane to end; what it ended with, None after a drain."""
        await asyncio.wait({self._task}, timeout=60)
        return self._task.exception()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Simulation:
    """The service without gRPC: a dispatcher, lanes as they are added, and one gateway's session."""

    def __init__(self, tracer: Any = None, **settings: object) -> None:
        self.config = SchedulerServiceConfig.model_validate(settings)
        self.clock = ManualClock()
        self.pool = Pool(self.config, self.clock)
        self.dispatcher = Dispatcher(self.config, self.pool, self.clock, RequestTraces(tracer, self.clock))
        self.session = Session("gateway")
        self.answers = Answers()
        self.lanes: list[SimulatedLane] = []

    def add_lane(
        self,
        executor_id: str = "executor-0",
        *,
        is_stepped: bool = False,
        executor: Executor | None = None,
        **sizes: object,
    ) -> SimulatedLane:
        """Args: executor: runs its steps; None for an `ArithmeticExecutor`. The rest is `build_info`'s."""
        info = build_info(executor_id, **sizes)  # type: ignore[arg-type]
        self.lanes.append(SimulatedLane(self, info, is_stepped=is_stepped, executor=executor))
        return self.lanes[-1]

    def change(self, **settings: object) -> None:
        """Other settings, for lanes that are added from now on."""
        self.config = self.config.model_copy(update=settings)

    def submit(self, handle: int, spec: RequestSpec, resubmission: Resubmission | None = None) -> None:
        self.answers.num_known[handle] = len(spec.output_token_ids)
        self.dispatcher.submit(self.session, handle, spec, resubmission)

    def read(self) -> Answers:
        """Everything that the gateway has been told so far."""
        read_outbox(self.session.outbox, self.answers)
        return self.answers

    async def until_started(self, handle: int) -> Answer:
        """Lets the lanes run until the request of a handle has been bound; the test's timeout bounds it."""
        await until(lambda: bool(self.read()[handle].started))
        return self.answers[handle]

    async def until_ended(self, handle: int) -> Answer:
        await until(lambda: self.read()[handle].ended is not None)
        return self.answers[handle]

    async def stop(self) -> None:
        for lane in self.lanes:
            await lane.stop()


def read_outbox(outbox: Outbox, answers: Answers) -> None:
    while (response := outbox.take()) is not None:
        answers.read(response)


async def settle(rounds: int = 30) -> None:
    """Lets the lanes run until they wait for something; nothing here waits for time."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Lets the lanes run until `condition`; the test's timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - there is no event for it, and no time passes
        await asyncio.sleep(0)
