"""Executors that write down when their steps arrive, in a process of their own; benchmarks start it (pool.py).

    python benchmarks/executors.py --scheduler HOST:PORT --count N --decode-us N --prefill-us N ...

Each line on standard input asks for the records so far; the answer is one JSON line: for each executor a list of
`[arrival_ns, latency_ns]`, one entry for every step that ran requests, on the clock of `time.perf_counter_ns`, which
all processes of a machine share. The end of standard input ends the process.

Two kinds. `stub` speaks the protocol and is nothing else: a step arrives when gRPC hands it over, its result leaves
when a device would be done that ran one step after the other, and many of them fit on one core beside the scheduler
that is measured. `real` is the product's executor on the simulated device: a step arrives when the device is asked to
launch it, so what the executor itself takes to get there counts as well.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio
from steady import MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, VERSION, Answerer, executor_info

from executor_svc.config import ExecutorConfig
from executor_svc.devices.base import Device, StepInputs
from executor_svc.devices.simulated_config import create_simulated_device
from executor_svc.server import ExecutorProcess
from holdback import codec, rpc
from holdback.telemetry import configure_logging
from holdback.types import Phase
from holdback.v1 import executor_pb2, executor_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

Records = list[tuple[int, int]]
MIN_PREFILL_BUCKET = 128
STOP_GRACE_S = 2.0


class StubExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """Registers, and answers each step when a device would: `end = max(end of the step before, arrival) + latency`."""

    def __init__(self, executor_id: str, flags: argparse.Namespace) -> None:
        self.records: Records = []
        self._id = executor_id
        self._flags = flags
        self._latency_ns = {Phase.PREFILL: flags.prefill_us * 1000, Phase.DECODE: flags.decode_us * 1000}
        self._server = rpc.create_server()
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(self, self._server)
        self._stop = asyncio.Event()

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Serves until `stop`. Raises what ended the registration before that."""
        port = rpc.bind(self._server, "127.0.0.1", 0)
        await self._server.start()
        info = executor_info(
            self._flags.max_num_seqs,
            self._flags.max_num_seqs,
            executor_id=self._id,
            lease=secrets.token_hex(16),
            port=port,
            decode_us=self._flags.decode_us,
            prefill_us=self._flags.prefill_us,
        )
        registered = asyncio.create_task(self._register(codec.encode_executor_info(info)))
        await first_of(registered, asyncio.create_task(self._stop.wait()))
        await self._server.stop(STOP_GRACE_S)

    async def _register(self, info: scheduler_pb2.ExecutorInfo) -> None:
        async with rpc.create_channel(self._flags.scheduler) as channel:
            call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Register()
            await call.write(scheduler_pb2.RegisterRequest(executor=info))
            response: Any = await call.read()
            interval_s = response.accepted.heartbeat_interval_ms / 1000
            beats = asyncio.create_task(self._send_heartbeats(call, interval_s))
            await first_of(beats, asyncio.create_task(self._read_heartbeats(call)))
        raise RuntimeError(f"the scheduler ended the registration of {self._id}")

    @staticmethod
    async def _read_heartbeats(call: Any) -> None:
        while await call.read() is not grpc.aio.EOF:
            """They only say that the scheduler lives."""

    @staticmethod
    async def _send_heartbeats(call: Any, interval_s: float) -> None:
        number = 0
        while True:
            await call.write(scheduler_pb2.RegisterRequest(heartbeat=scheduler_pb2.Heartbeat(number=number)))
            number += 1
            await asyncio.sleep(interval_s)

    async def Execute(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await context.read()  # the lease; this one is never lost
        accepted = executor_pb2.ExecutionAccepted(protocol_version=VERSION)
        await context.write(executor_pb2.ExecuteResponse(accepted=accepted))
        done: asyncio.Queue[executor_pb2.ExecuteResponse] = asyncio.Queue()
        device = _Timeline(done.put_nowait)
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await first_of(
                asyncio.create_task(self._read(context, device)),
                asyncio.create_task(self._write(context, done)),
                stopped,
            )
        finally:
            device.stop()

    async def _read(self, context: Any, device: _Timeline) -> None:
        answerer = Answerer()
        while (request := await context.read()) is not grpc.aio.EOF:
            arrival_ns = time.perf_counter_ns()
            response = executor_pb2.ExecuteResponse(output=answerer.answer(request.step))
            phase = codec.decode_phase(request.step.phase)
            latency_ns = 0 if phase is None else self._latency_ns[phase]
            device.run(arrival_ns, latency_ns, response)
            if phase is not None:
                self.records.append((arrival_ns, latency_ns))

    @staticmethod
    async def _write(context: Any, done: asyncio.Queue[executor_pb2.ExecuteResponse]) -> None:
        while True:
            await context.write(await done.get())


async def first_of(*tasks: asyncio.Task[Any]) -> None:
    """Waits for the first to end and cancels the others. Raises what it ended with."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


class _Timeline:
    """A thread that lets each result go when its time has come; asyncio's own timers are up to a millisecond late."""

    def __init__(self, let_go: Callable[[executor_pb2.ExecuteResponse], None]) -> None:
        self._let_go = let_go
        self._loop = asyncio.get_running_loop()
        self._end_ns = 0
        self._queue: queue.SimpleQueue[tuple[int, executor_pb2.ExecuteResponse] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def run(self, arrival_ns: int, latency_ns: int, response: executor_pb2.ExecuteResponse) -> None:
        self._end_ns = max(self._end_ns, arrival_ns) + latency_ns
        self._queue.put((self._end_ns, response))

    def stop(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            end_ns, response = item
            time.sleep(max(0, end_ns - time.perf_counter_ns()) / 1e9)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._let_go, response)


class RealExecutor:
    """The product's executor, with a note of each launch."""

    def __init__(self, executor_id: str, flags: argparse.Namespace) -> None:
        self.records: Records = []
        settings: dict[str, object] = {
            "scheduler": flags.scheduler,
            "executor_id": executor_id,
            "device": "simulated",
            "max_num_seqs": flags.max_num_seqs,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "max_model_len": MAX_MODEL_LEN,
            "simulated_decode_us": flags.decode_us,
            "simulated_prefill_us_per_token": flags.prefill_us / MIN_PREFILL_BUCKET,
        }
        self._latency_ns = {Phase.PREFILL: flags.prefill_us * 1000, Phase.DECODE: flags.decode_us * 1000}
        self._process = ExecutorProcess(ExecutorConfig.model_validate(settings), self._create)

    async def run(self) -> None:
        """Serves until `stop`."""
        await self._process.run()

    def stop(self) -> None:
        self._process.stop()

    def _create(self, config: ExecutorConfig) -> Device:
        device = create_simulated_device(config)
        launch = device.launch

        def launch_and_note(inputs: StepInputs) -> object:
            self.records.append((time.perf_counter_ns(), self._latency_ns[inputs.key.phase]))
            return launch(inputs)

        device.launch = launch_and_note  # type: ignore[method-assign]
        return device


def answer_requests(records: list[Records], finish: Callable[[], object]) -> None:
    for _ in sys.stdin:
        print(json.dumps(records), flush=True)
    finish()


async def run(flags: argparse.Namespace) -> None:
    kind = StubExecutor if flags.kind == "stub" else RealExecutor
    executors = [kind(f"executor-{flags.first + number}", flags) for number in range(flags.count)]
    tasks = [asyncio.create_task(executor.run()) for executor in executors]
    asked_to_end = asyncio.Event()
    finish = partial(asyncio.get_running_loop().call_soon_threadsafe, asked_to_end.set)
    records = [executor.records for executor in executors]
    threading.Thread(target=answer_requests, args=(records, finish), daemon=True).start()
    end = asyncio.create_task(asked_to_end.wait())
    await asyncio.wait({*tasks, end}, return_when=asyncio.FIRST_COMPLETED)
    for executor in executors:
        executor.stop()
    await asyncio.gather(*tasks, end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", required=True, metavar="HOST:PORT")
    parser.add_argument("--kind", choices=("stub", "real"), default="stub")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first one, for its name")
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--decode-us", type=int, required=True)
    parser.add_argument("--prefill-us", type=int, required=True)
    flags = parser.parse_args()
    configure_logging("executors", "error")
    asyncio.run(run(flags))


if __name__ == "__main__":
    main()
