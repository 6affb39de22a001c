"""How many executors one scheduler process drives before their devices stand idle.

    python benchmarks/many_executors.py [--json FILE] [--quick] [--executors 1,4,8,16,24,32,40,48]

As device_idle.py, asynchronous, with stub executors that share processes: 64 streams each, steps of 25 ms, one gateway.
It breaks, and ends, at the first number of executors whose devices are idle for more than `--limit-pct` of the time:
`typical_pct` is the median of half seconds, while `idle_pct` is over the whole window and shows whatever else the
machine did. vLLM has no column here: one of its schedulers drives one engine.
"""

from __future__ import annotations

import argparse
import asyncio

from idle import Load, Window, watch
from pool import START_TIMEOUT_S, start_pool
from report import Cell, Table, parse_numbers, parser_of, write_json

COLUMNS = ("executors", "streams", "steps_per_s", "idle_pct", "typical_pct", "largest_gap_ms", "cpu_pct", "gateway_cpu")


async def measure(num_executors: int, flags: argparse.Namespace) -> Window:
    step_us = str(flags.step_ms * 1000)
    async with start_pool(
        num_executors=num_executors,
        num_hosts=min(flags.hosts, num_executors),
        scheduler_flags=["--async-scheduling", "--max-num-queued-reqs", "100000"],
        host_flags=["--max-num-seqs", str(flags.streams), "--decode-us", step_us, "--prefill-us", step_us],
    ) as pool:
        load = Load(pool, flags.streams, num_executors=num_executors, changes=flags.changes)
        await load.start()
        try:
            return await watch(pool, load, flags.seconds)
        finally:
            load.stop()


def row_of(num_executors: int, window: Window, flags: argparse.Namespace) -> dict[str, Cell]:
    idle = window.idle
    return {
        "executors": num_executors,
        "streams": num_executors * flags.streams,
        "steps_per_s": idle.num_steps / flags.seconds,
        "idle_pct": idle.share * 100,
        "typical_pct": idle.typical_share * 100,
        "largest_gap_ms": idle.largest_gap_ms,
        "cpu_pct": None if window.scheduler_cpu is None else window.scheduler_cpu * 100,
        "gateway_cpu": window.gateway_cpu * 100,
    }


async def run(flags: argparse.Namespace) -> dict[str, object]:
    load = "changing" if flags.changes else "steady"
    print(f"{flags.streams} streams an executor, {load}, steps of {flags.step_ms} ms, windows of {flags.seconds:g} s")
    print("cpu_pct: of the scheduler, one core; gateway_cpu: of this process, the same")
    table = Table(*COLUMNS)
    rows: list[dict[str, Cell]] = []
    breaks_at = None
    for num_executors in flags.executors:
        try:
            window = await measure(num_executors, flags)
        except TimeoutError:
            print(f"{num_executors} executors did not all come to serve in {START_TIMEOUT_S:g} s")
            breaks_at = num_executors
            break
        rows.append(row_of(num_executors, window, flags))
        table.row(*rows[-1].values())
        if window.idle.typical_share * 100 > flags.limit_pct:
            breaks_at = num_executors
            break
    print(
        f"idle for more than {flags.limit_pct:g} %: " + ("none of these" if breaks_at is None else f"from {breaks_at}")
    )
    return {"rows": rows, "breaks_at": breaks_at}


def main() -> None:
    parser = parser_of(__doc__, has_peer=False)
    parser.add_argument("--executors", type=parse_numbers, default=[1, 4, 8, 16, 24, 32, 40, 48], metavar="N,N")
    parser.add_argument("--streams", type=int, default=64, help="of each executor")
    parser.add_argument("--step-ms", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each window")
    parser.add_argument("--hosts", type=int, default=2, help="processes that the executors share")
    parser.add_argument("--limit-pct", type=float, default=2.0)
    parser.add_argument("--changes", action="store_true", help="a join or an end every 10 steps on each executor")
    flags = parser.parse_args()
    if flags.quick:
        flags.executors, flags.streams, flags.seconds = [2], 8, 0.5
    write_json(flags.json, asyncio.run(run(flags)))


if __name__ == "__main__":
    main()
