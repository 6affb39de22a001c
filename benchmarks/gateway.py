"""What the gateway adds to an answer, how many streams it carries, and what its OpenAI API costs beside SMG's.

    python benchmarks/gateway.py MODEL [--json FILE] [--quick]

MODEL is a directory with a tokenizer and a chat template; the device is simulated, so that steps take a known time. All
processes are real and on this machine, the clients in this one.

- added: one stream. The gap between tokens against the step of the device, and how long a token takes from the
  scheduler's having it to the client, by the clock of the machine.
- streams: 64 streams at steps of 25 ms; gaps between messages of a stream, over gRPC and as server-sent events.
- saturation: steps of 1 ms and ever more streams, until the gateway has no more of its processor to give. A stream that
  lags gets several tokens in one message, so tokens go on growing when messages do not.
- cost: processor seconds of the servers for 1,000 tokens of chat, ours against SMG with our engine protocol behind it.
- slow: one client that reads a message each second while 32 others run; their gaps with and without it, and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import pathlib
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence

import grpc.aio
from gateway_load import Arrivals, Open, first_token, in_turns, open_channel, over_grpc, over_http, read, read_many
from report import Table, parser_of, write_json

from holdback.cli.local import LocalStack
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2

Row = dict[str, float | str | None]
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MODEL_NAME = "bench"
START_S = 60.0


def stack_arguments(model: pathlib.Path, step_us: int, max_num_seqs: int) -> dict[str, Sequence[str]]:
    executor = {
        "device": "simulated",
        "model": str(model),
        "max-model-len": 4096,
        "max-num-batched-tokens": 512,
        "max-num-seqs": max_num_seqs,
        "num-blocks": 1 + max_num_seqs * 256,
        "simulated-decode-us": step_us,
    }
    return {
        "scheduler": ["--log-level", "warning", "--num-state-steps", "2000"],
        "executor": [f"--{key}={value}" for key, value in executor.items()] + ["--log-level", "warning"],
        "gateway": [
            *("--tokenizer", str(model), "--served-model-name", MODEL_NAME),
            *("--http-port", "0", "--log-level", "warning"),
        ],
    }


@contextlib.asynccontextmanager
async def started(flags: argparse.Namespace, step_us: int, max_num_seqs: int = 64) -> AsyncIterator[LocalStack]:
    async with LocalStack(stack_arguments(flags.model, step_us, max_num_seqs)) as stack:
        await stack.wait_until_ready()
        yield stack


@contextlib.asynccontextmanager
async def grpc_streams(stack: LocalStack) -> AsyncIterator[Open]:
    channel = await open_channel(stack.gateway_address)
    async with channel:
        open_stream = over_grpc(channel)
        await first_token(open_stream)
        yield open_stream


def http_streams(stack: LocalStack) -> Open:
    assert stack.http_address is not None
    return over_http(stack.http_address, MODEL_NAME)


def percentile(values: Sequence[float], share: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


def cpu_s(*pids: int) -> float:
    """Processor seconds of processes and of those that they have started, so far."""
    total = 0
    for pid in pids:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += sum(map(int, fields[11:15]))  # utime, stime, and those of children that ended
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        total += round(cpu_s(*map(int, children)) * TICKS_PER_S)
    return total / TICKS_PER_S


def resident_mb(pid: int) -> float:
    return int(pathlib.Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * PAGE_BYTES / 1e6


# ---- added ----


async def measure_added(flags: argparse.Namespace) -> list[Row]:
    step_us, num_tokens = 5_000, 50 if flags.quick else 1000
    async with started(flags, step_us) as stack, grpc_streams(stack) as open_stream:
        arrivals = Arrivals()
        offset_s = time.time() - time.perf_counter()
        arrivals = await read(open_stream(1, num_tokens))
        delays = await _delays_ms(stack, arrivals, offset_s)
    gaps = arrivals.gaps_ms()[5:-3]  # first messages and the end are no tokens
    return [
        {
            "what": "gap - step",
            "median_ms": statistics.median(gaps) - step_us / 1000,
            "p99_ms": percentile(gaps, 0.99) - step_us / 1000,
        },
        {"what": "scheduler to client", "median_ms": statistics.median(delays), "p99_ms": percentile(delays, 0.99)},
    ]


async def _delays_ms(stack: LocalStack, arrivals: Arrivals, offset_s: float) -> list[float]:
    """From the arrival of a decode step's result at the scheduler to that of its token at the client."""
    async with grpc.aio.insecure_channel(stack.scheduler_address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        state = await stub.GetState(scheduler_pb2.GetStateRequest())
    (lane,) = state.lanes
    results = [
        (step.sent_unix_us + step.duration_us) / 1e6
        for step in lane.steps
        if step.phase == types_pb2.PHASE_DECODE and step.HasField("duration_us")
    ]
    results.sort()
    received = [at + offset_s for at in arrivals.times]
    delays = []
    for at in received[5:-3]:
        before = [result for result in results if result <= at]
        delays.append((at - before[-1]) * 1000)
    return delays


# ---- streams, saturation ----


async def measure_streams(flags: argparse.Namespace) -> list[Row]:
    step_ms, num_streams, num_tokens = 25, 8 if flags.quick else 64, 80 if flags.quick else 400
    rows: list[Row] = []
    async with started(flags, step_ms * 1000) as stack, grpc_streams(stack) as open_stream:
        for name, opened in (("gRPC", open_stream), ("SSE", http_streams(stack))):
            before, began = cpu_s(stack.gateway.child.pid), time.perf_counter()
            gaps = _gaps_once_all_run(await read_many(opened, num_streams, num_tokens))
            used = cpu_s(stack.gateway.child.pid) - before
            rows.append(
                {
                    "over": name,
                    "streams": num_streams,
                    "gap_median_ms": statistics.median(gaps),
                    "gap_p99_ms": percentile(gaps, 0.99),
                    "gap_max_ms": max(gaps),
                    "gateway_cpu_pct": 100 * used / (time.perf_counter() - began),
                }
            )
    return rows


def _gaps_once_all_run(streams: Sequence[Arrivals]) -> list[float]:
    """Gaps while all of them run: prompts that are let in one after the other hide no decode then."""
    since = max(stream.times[min(2, len(stream.times) - 1)] for stream in streams)
    until = min(stream.times[-min(3, len(stream.times))] for stream in streams)
    return [gap for stream in streams for gap in stream.gaps_ms(since, until)]


async def measure_saturation(flags: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    num_tokens = 40 if flags.quick else 600
    async with started(flags, 1_000, max_num_seqs=256) as stack, grpc_streams(stack) as open_stream:
        for name, opened in (("gRPC", open_stream), ("SSE", http_streams(stack))):
            for num_streams in (8,) if flags.quick else (16, 64, 256):
                before, began = cpu_s(stack.gateway.child.pid), time.perf_counter()
                streams = await read_many(opened, num_streams, num_tokens)
                seconds = time.perf_counter() - began
                used = cpu_s(stack.gateway.child.pid) - before
                rows.append(
                    {
                        "over": name,
                        "streams": num_streams,
                        "tokens_per_s": num_streams * num_tokens / seconds,
                        "messages_per_s": sum(len(stream.times) for stream in streams) / seconds,
                        "gateway_cpu_pct": 100 * used / seconds,
                    }
                )
    return rows


# ---- cost ----


async def measure_cost(flags: argparse.Namespace) -> list[Row]:
    """Alternated; the gateway's share of SMG's way is counted with it."""
    num_streams, num_tokens, rounds = (4, 20, 1) if flags.quick else (32, 300, 3)
    seconds: dict[str, list[float]] = {"holdback": [], "smg + holdback": []}
    async with started(flags, 10_000) as stack, _started_smg(flags, stack.gateway_address) as (smg_pid, smg_address):
        gateway_pid = stack.gateway.child.pid
        ways = {
            "holdback": (http_streams(stack), (gateway_pid,)),
            "smg + holdback": (over_http(smg_address, MODEL_NAME), (gateway_pid, smg_pid)),
        }

        def run_of(name: str) -> object:
            opened, pids = ways[name]

            async def run() -> None:
                before = cpu_s(*pids)
                await read_many(opened, num_streams, num_tokens)
                seconds[name].append((cpu_s(*pids) - before) * 1000 / (num_streams * num_tokens))

            return run

        for opened, _ in ways.values():
            await first_token(opened)
        await in_turns([run_of(name) for name in ways], rounds)  # type: ignore[misc]
    return [{"server": name, "cpu_s_per_1000_tokens": statistics.median(values)} for name, values in seconds.items()]


@contextlib.asynccontextmanager
async def _started_smg(flags: argparse.Namespace, worker: str) -> AsyncIterator[tuple[int, str]]:
    port, metrics_port = _free_ports(2)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "smg", "launch", "--backend", "vllm", "--worker-urls", f"grpc://{worker}"),
        *("--model-path", str(flags.model), "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"},
    )
    try:
        await _wait_for_http(port)
        yield process.pid, f"127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


async def _wait_for_http(port: int) -> None:
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /readiness HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                status = await reader.readline()
                writer.close()
                if b" 200 " in status:
                    return
            await asyncio.sleep(0.1)


# ---- slow ----


async def measure_slow(flags: argparse.Namespace) -> list[Row]:
    num_streams, num_tokens = (4, 20) if flags.quick else (32, 400)
    rows: list[Row] = []
    async with started(flags, 10_000) as stack, grpc_streams(stack) as open_stream:
        await read_many(open_stream, num_streams, num_tokens)  # memory that is taken once is there
        for num_slow in (0, 1, 0, 1):
            before = resident_mb(stack.gateway.child.pid)
            slow = [asyncio.create_task(read(open_stream(900, 4000), pause_s=1.0)) for _ in range(num_slow)]
            gaps = _gaps_once_all_run(await read_many(open_stream, num_streams, num_tokens))
            rows.append(
                {
                    "slow clients": num_slow,
                    "gap_p99_ms": percentile(gaps, 0.99),
                    "memory_grown_mb": resident_mb(stack.gateway.child.pid) - before,
                }
            )
            for task in slow:
                task.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
    return rows


PARTS = {
    "added": measure_added,
    "streams": measure_streams,
    "saturation": measure_saturation,
    "cost": measure_cost,
    "slow": measure_slow,
}


async def run(flags: argparse.Namespace) -> dict[str, object]:
    result: dict[str, object] = {}
    for name in flags.parts.split(","):
        print(f"\n{name}", flush=True)
        rows = await PARTS[name](flags)
        table = Table(*rows[0])
        for row in rows:
            table.row(*row.values())
        result[name] = rows
    return result


def main() -> None:
    parser = parser_of(__doc__, has_peer=False)
    parser.add_argument("model", metavar="MODEL", type=pathlib.Path, help="directory with tokenizer and chat template")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)}")
    flags = parser.parse_args()
    write_json(flags.json, asyncio.run(run(flags)))


if __name__ == "__main__":
    main()
