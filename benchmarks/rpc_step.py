"""Bytes and microseconds of a step over loopback, through the real `Execute` stream, with a device that takes no time.

    python benchmarks/rpc_step.py [--vllm-python PATH] [--json FILE] [--quick]

Scheduler, executor (the simulated device with latency 0) and gateway are processes; `running` requests decode and
nobody comes or goes. The machine's cores are all that limits the steps, so with fewer than three of them the processes
wait for each other.

- `bytes_down`: of a steady decode step without its new blocks, the median; `with_blocks` the mean with them.
- `bytes_up`: of its result; `per_row` is that, less 64, over the rows: at most 4 is the budget.
- `step_us`: from one step to the next, the median. In it, where steps are not asynchronous: `scheduler_us`, from a
  result to the next step; `executor_us`, what the executor reports of itself; `rest_us`, the rest: both ways over
  loopback, two event loops that wake up, and the simulated device's arithmetic.
- `vllm_*`: vLLM's way of a step from its engine to a worker process, through shared memory (peers/vllm_rpc.py):
  pickled bytes, the time from sending to the result, and with `schedule()` and `update_from_output()`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence

from pool import start_pool
from report import Table, parse_numbers, parser_of, write_json
from steady import request_spec
from vllm_peer import VllmPeer

PROGRAM = pathlib.Path(__file__).parent / "counting_scheduler.py"
NUM_SETTLING_STEPS = 20
PEER_NUMBERS = ("bytes_down", "bytes_up", "rpc_us", "step_us")

Messages = dict[str, list[list[int]]]
Row = dict[str, int | float | bool | None]


async def record(running: int, *, is_async: bool, seconds: float) -> Messages:
    """Runs a steady decode for a while; what was sent and received meanwhile."""
    with tempfile.TemporaryDirectory(prefix="holdback-") as folder:
        file = pathlib.Path(folder) / "messages.json"
        async with start_pool(
            num_executors=1,
            scheduler_program=(str(PROGRAM), str(file)),
            scheduler_flags=["--async-scheduling" if is_async else "--no-async-scheduling"],
            host_flags=["--kind", "real", "--max-num-seqs", str(running), "--decode-us", "0", "--prefill-us", "0"],
        ) as pool:
            gateway = pool.gateway
            for number in range(running):
                gateway.add(number, request_spec(number))
            await gateway.until(lambda: gateway.num_started >= running)
            settled = gateway.num_tokens + running * NUM_SETTLING_STEPS
            await gateway.until(lambda: gateway.num_tokens >= settled)
            start_ns = time.perf_counter_ns()
            await asyncio.sleep(seconds)
            stop_ns = time.perf_counter_ns()
        messages: Messages = json.loads(file.read_text(encoding="utf-8"))
    return {name: [row for row in rows if start_ns <= row[0] <= stop_ns] for name, rows in messages.items()}


def summarize(running: int, is_async: bool, messages: Messages) -> Row:
    sent, received = messages["sent"], messages["received"]
    steady = [row for row in sent if row[3] == 0]
    if len(steady) < len(sent) // 2 or not all(row[2] == running for row in received):
        raise RuntimeError(f"{len(steady)} of {len(sent)} steps were steady decodes of {running}")
    times = [row[0] for row in received]
    bytes_up = float(statistics.median(row[1] for row in received))
    parts = dict.fromkeys(("scheduler_us", "executor_us", "rest_us")) if is_async else split(sent, received)
    return {
        "running": running,
        "async": is_async,
        "bytes_down": float(statistics.median(row[2] for row in steady)),
        "with_blocks": statistics.fmean(row[1] for row in steady),
        "bytes_up": bytes_up,
        "per_row": max(0.0, bytes_up - 64) / running,
        "step_us": median_us([after - before for before, after in itertools.pairwise(times)]),
        **parts,
    }


def split(sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]]) -> dict[str, float | None]:
    """Where the time of a synchronous step goes. Results and steps alternate; the window starts with a step."""
    received = [row for row in received if row[0] > sent[0][0]]
    pairs = list(zip(sent, received, strict=False))
    executor_us = statistics.median(sum(row[3:6]) for row in received)
    away_us = median_us([result[0] - step[0] for step, result in pairs])
    here_us = median_us([step[0] - result[0] for result, step in zip(received, sent[1:], strict=False)])
    return {"scheduler_us": here_us, "executor_us": executor_us, "rest_us": away_us - executor_us}


def median_us(durations_ns: Sequence[int]) -> float:
    return statistics.median(durations_ns) / 1000


def peer_row(peer: VllmPeer | None, running: int, is_async: bool, num_steps: int) -> Row:
    answer = peer.run("rpc", running=running, num_steps=num_steps, **{"async": is_async}) if peer else {}
    return {f"vllm_{name}": answer.get(name) for name in PEER_NUMBERS}


async def run(flags: argparse.Namespace, peer: VllmPeer | None) -> dict[str, object]:
    print(f"per step, over {flags.seconds:g} s each")
    table: Table | None = None
    rows: list[Row] = []
    for running in flags.running:
        for is_async in (False, True):
            messages = await record(running, is_async=is_async, seconds=flags.seconds)
            row = summarize(running, is_async, messages) | peer_row(peer, running, is_async, flags.peer_steps)
            table = table or Table(*row)
            table.row(*row.values())
            rows.append(row)
    return {"rows": rows}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--running", type=parse_numbers, default=[8, 32, 64, 128, 256], metavar="N,N")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each row; at most what 4,000 tokens allow")
    parser.add_argument("--peer-steps", type=int, default=500, help="steps of each row of the peer")
    flags = parser.parse_args()
    if flags.quick:
        flags.running, flags.seconds, flags.peer_steps = [8], 0.3, 50
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(VllmPeer(flags.vllm_python, "vllm_rpc.py")) if flags.vllm_python else None
        write_json(flags.json, asyncio.run(run(flags, peer)))


if __name__ == "__main__":
    main()
