"""Schedulers in a steady decode, run for a few steps at a time: the contenders of scheduler_step.py.

`CoreBench` is the core alone, `WireBench` the whole scheduler without sockets, `VllmBench` vLLM's, in its own process.
All of them work on one thread and wait for nothing, and what is taken is the processor time of that thread. On a quiet
machine that is the time that passes. On a busy one the time that passes would tell more of the others, and most where a
step takes as long as the system lets a thread run at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Protocol

from memory_grpc import MemoryServer, MemoryStream, in_memory
from steady import EOS_TOKEN_IDS, TOKEN, VERSION, Answerer, SamplingRows, executor_info, request_spec
from vllm_peer import VllmPeer

from holdback import codec
from holdback.types import ExecutorInfo, ModelRunnerOutput, SchedulerOutput
from holdback.v1 import executor_pb2, scheduler_pb2
from scheduler_svc.config import SchedulerServiceConfig
from scheduler_svc.core.async_scheduling import NeuronAsyncScheduler
from scheduler_svc.core.config import KvAdmission
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from scheduler_svc.core.request import Request
from scheduler_svc.lane import scheduler_config
from scheduler_svc.latency import LatencyTable
from scheduler_svc.server import SchedulerServer

SERVICE = "/holdback.v1.SchedulerService/"
NUM_WARM_UP_STEPS = 20
STEP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Variant:
    """One state in which steps are measured.

    Attributes:
        refused_by: the rule of admission that refuses one more request at every step; None: that request is not there.
    """

    running: int
    waiting: int
    is_async: bool
    refused_by: KvAdmission | None = None

    @property
    def name(self) -> str:
        return "/".join(str(value) for value in asdict(self).values())

    @property
    def is_refused(self) -> bool:
        return self.refused_by is not None

    @property
    def num_waiting(self) -> int:
        return self.waiting + self.is_refused

    def info(self) -> ExecutorInfo:
        """As many slots as requests run, and one more where blocks are to refuse."""
        return executor_info(self.running + self.is_refused, self.running)

    def config(self) -> SchedulerServiceConfig:
        settings: dict[str, object] = {
            "max_num_queued_reqs": 100_000,
            "heartbeat_interval_s": 60,
            "lease_timeout_s": 600,  # a step stays in flight while others are measured
            "min_step_timeout_s": 3600,
            "max_step_timeout_s": 3600,
        }
        return SchedulerServiceConfig.model_validate(settings)


class Bench(Protocol):
    async def run(self, num_steps: int) -> list[float]:
        """Microseconds of each step."""
        ...


class CoreBench:
    """The core alone, with a queue of its own."""

    def __init__(self, variant: Variant) -> None:
        cls = NeuronAsyncScheduler if variant.is_async else NeuronScheduler
        info = variant.info()
        self.core = cls(scheduler_config(info, variant.config()), None, LatencyTable(info).graph_us)
        self._depth = cls.max_steps_in_flight
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._rows = SamplingRows()
        for number in range(variant.running + variant.num_waiting):
            spec = request_spec(number)
            self.core.add_request(Request(spec.request_id, spec, EOS_TOKEN_IDS))
        while len(self.core.running) < variant.running or self.core.has_prefill_in_running:
            self._step()
        for _ in range(NUM_WARM_UP_STEPS):
            self._step()

    async def run(self, num_steps: int) -> list[float]:
        return [self._step() for _ in range(num_steps)]

    def _step(self) -> float:
        """One `schedule()`, and once there are as many steps in flight as may be, one `update_from_output()`."""
        began = time.thread_time()
        output = self.core.schedule()
        took = time.thread_time() - began
        self._in_flight.append((output, ModelRunnerOutput(output.step, [TOKEN] * self._rows.count(output))))
        if len(self._in_flight) == self._depth:
            oldest, result = self._in_flight.popleft()
            began = time.thread_time()
            self.core.update_from_output(oldest, result)
            took += time.thread_time() - began
        return took * 1e6


@dataclass
class Written:
    """What the scheduler wrote on one stream."""

    data: deque[bytes] = field(default_factory=deque)
    count: int = 0
    at: float = 0.0

    def add(self, data: bytes) -> None:
        self.at = time.thread_time()
        self.data.append(data)
        self.count += 1


class WireBench:
    """A whole scheduler without sockets: one executor and one gateway, played by the benchmark."""

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self._steps, self._updates = Written(), Written()
        self._answerer = Answerer()
        self._answers: deque[bytes] = deque()
        self._execute: MemoryStream | None = None
        self._awaits = (0, 0)
        self._arrived: asyncio.Future[None] | None = None

    async def start(self) -> None:
        with in_memory(self._opened) as servers:
            self.server = SchedulerServer(self._variant.config())
            await self.server.start()
            server = next(server for server in servers if server.has(SERVICE + "Connect"))
            await self._join(server)
        await self._connect(server)
        variant = self._variant
        for number in range(variant.running):
            self._add(number)
        await self._run_until_decoding()
        for number in range(variant.running, variant.running + variant.num_waiting):
            self._add(number)
        await self.run(NUM_WARM_UP_STEPS)
        self.check()

    async def stop(self) -> None:
        await self.server.stop()

    def check(self) -> None:
        """The state that was to be measured is the one that was."""
        dispatcher, variant = self.server.dispatcher, self._variant
        found = (sum(len(lane.core.running) for lane in dispatcher.lanes), dispatcher.num_waiting)
        assert found == (variant.running, variant.num_waiting), found

    async def run(self, num_steps: int) -> list[float]:
        took = []
        heartbeat = scheduler_pb2.RegisterRequest(heartbeat=scheduler_pb2.Heartbeat())
        self._registration.deliver(heartbeat.SerializeToString())
        async with asyncio.timeout(STEP_TIMEOUT_S):
            for _ in range(num_steps):
                took.append(await self._step())
        return took

    async def _step(self) -> float:
        """Delivers one result; microseconds until both messages that follow from it are written."""
        assert self._execute is not None
        answer = self._answers.popleft()
        began = time.thread_time()
        self._execute.deliver(answer)
        await self._until(self._steps.count + 1, self._updates.count + 1)
        took = max(self._steps.at, self._updates.at) - began
        self._updates.data.clear()
        self._answer_steps()
        return took * 1e6

    async def _until(self, num_steps: int, num_updates: int) -> None:
        self._awaits = (num_steps, num_updates)
        self._arrived = asyncio.get_running_loop().create_future()
        self._look()
        await self._arrived

    def _look(self) -> None:
        num_steps, num_updates = self._awaits
        if self._arrived is None or self._steps.count < num_steps or self._updates.count < num_updates:
            return
        if not self._arrived.done():
            self._arrived.set_result(None)

    def _answer_steps(self) -> None:
        """Prepares the results of the steps that were sent, while no clock runs."""
        while self._steps.data:
            request = executor_pb2.ExecuteRequest.FromString(self._steps.data.popleft())
            output = self._answerer.answer(request.step)
            self._answers.append(executor_pb2.ExecuteResponse(output=output).SerializeToString())

    async def _run_until_decoding(self) -> None:
        """Prefills everybody. Steps that sample nothing tell the gateway nothing, so only the steps are waited for."""
        assert self._execute is not None
        running, lanes = self._variant.running, self.server.dispatcher.lanes
        async with asyncio.timeout(STEP_TIMEOUT_S):
            await self._until(1, 0)
            self._answer_steps()
            while len(lanes[0].core.running) < running or lanes[0].core.has_prefill_in_running:
                self._execute.deliver(self._answers.popleft())
                await self._until(self._steps.count + 1, 0)
                self._answer_steps()

    # ---- the other ends of the streams ----

    def _opened(self, stream: MemoryStream) -> None:
        """The scheduler dials the executor."""
        stream.on_write = self._on_execute_opened
        self._execute = stream

    def _on_execute_opened(self, data: bytes) -> None:
        assert self._execute is not None
        self._execute.on_write = self._on_step
        accepted = executor_pb2.ExecutionAccepted(protocol_version=VERSION)
        self._execute.deliver(executor_pb2.ExecuteResponse(accepted=accepted).SerializeToString())

    def _on_step(self, data: bytes) -> None:
        self._steps.add(data)
        self._look()

    def _on_update(self, data: bytes) -> None:
        self._updates.add(data)
        self._look()

    async def _join(self, server: MemoryServer) -> None:
        """The executor registers."""
        self._registration = server.open(SERVICE + "Register", lambda data: None)
        info = codec.encode_executor_info(self._variant.info())
        self._registration.deliver(scheduler_pb2.RegisterRequest(executor=info).SerializeToString())
        joined = asyncio.Event()
        self.server.pool.on_change(joined.set)
        async with asyncio.timeout(STEP_TIMEOUT_S):
            await joined.wait()

    async def _connect(self, server: MemoryServer) -> None:
        """The gateway connects; a first turn of the loop tells it the state of the pool."""
        self._gateway = server.open(SERVICE + "Connect", self._on_update)
        hello = scheduler_pb2.GatewayHello(protocol_version=VERSION, session="a session of 16 to 64 bytes")
        self._gateway.deliver(scheduler_pb2.ConnectRequest(hello=hello).SerializeToString())
        async with asyncio.timeout(STEP_TIMEOUT_S):
            await self._until(0, 2)

    def _add(self, number: int) -> None:
        add = scheduler_pb2.AddRequest(handle=number, spec=codec.encode_spec(request_spec(number)))
        self._gateway.deliver(scheduler_pb2.ConnectRequest(add=add).SerializeToString())


class VllmBench:
    """vLLM's scheduler, in a process of its own."""

    def __init__(self, variant: Variant, peer: VllmPeer, num_steps: int) -> None:
        self._peer = peer
        self._name = variant.name
        peer.run(
            "build",
            name=self._name,
            running=variant.running,
            waiting=variant.waiting,
            refused=int(variant.is_refused),
            num_steps=num_steps,
            **{"async": variant.is_async},
        )

    async def run(self, num_steps: int) -> list[float]:
        took: list[float] = self._peer.run("step", name=self._name, num_steps=num_steps)["us"]
        return took

    def stop(self) -> None:
        self._peer.run("drop", name=self._name)
