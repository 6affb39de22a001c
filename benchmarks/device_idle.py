"""Share of the time for which a device stands idle although work is runnable, over gRPC.

    python benchmarks/device_idle.py [--vllm-python PATH] [--json FILE] [--quick] [--executor stub|real]

Scheduler, executor and gateway are processes on loopback. The executor stub notes when each step arrives where it is
received, and lets each result go when a device would be done (executors.py); it does nothing else, for on a small
machine the work of a real one would be measured as if it were the scheduler's. `--executor real` takes the product's
executor on the simulated device, and measures to where the device is launched. A prefill takes as long as a decode.

`idle_pct` is over the whole window; `typical_pct` is the median of its half seconds, for a machine that does other
things too. `load` is `steady`, or `changing`: every 10 steps a request ends, or one joins (idle.py). `vllm_idle_pct` is
vLLM's engine loop with a device of the same latency in the same process, so without any network (peers/vllm_engine.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools

from idle import Load, Window, watch
from pool import start_pool
from report import Cell, Table, parse_numbers, parser_of, write_json
from vllm_peer import VllmPeer

COLUMNS = (
    "step_ms",
    "streams",
    "async",
    "load",
    "idle_pct",
    "typical_pct",
    "largest_gap_ms",
    "steps",
    "changed",
    "cpu_pct",
)


async def measure(step_ms: int, num_streams: int, *, is_async: bool, load: str, flags: argparse.Namespace) -> Window:
    step_us = str(step_ms * 1000)
    host = ("--kind", flags.executor, "--max-num-seqs", str(num_streams))
    async with start_pool(
        num_executors=1,
        scheduler_flags=["--async-scheduling" if is_async else "--no-async-scheduling"],
        host_flags=[*host, "--decode-us", step_us, "--prefill-us", step_us],
    ) as pool:
        streams = Load(pool, num_streams, changes=load == "changing")
        await streams.start()
        try:
            return await watch(pool, streams, flags.seconds)
        finally:
            streams.stop()


def row_of(step_ms: int, num_streams: int, is_async: bool, load: str, window: Window) -> dict[str, Cell]:
    return {
        "step_ms": step_ms,
        "streams": num_streams,
        "async": is_async,
        "load": load,
        "idle_pct": window.idle.share * 100,
        "typical_pct": window.idle.typical_share * 100,
        "largest_gap_ms": window.idle.largest_gap_ms,
        "steps": window.idle.num_steps,
        "changed": window.num_changes,
        "cpu_pct": None if window.scheduler_cpu is None else window.scheduler_cpu * 100,
    }


def vllm_idle_pct(
    peer: VllmPeer | None, step_ms: int, num_streams: int, *, is_async: bool, load: str, seconds: float
) -> float | None:
    if peer is None:
        return None
    changes = load == "changing"
    answer = peer.run(
        "idle", step_ms=step_ms, streams=num_streams, changes=changes, seconds=seconds, **{"async": is_async}
    )
    share: float = answer["idle"]
    return share * 100


async def run(flags: argparse.Namespace, peer: VllmPeer | None) -> dict[str, object]:
    print(
        f"device idle, {flags.executor} executor, windows of {flags.seconds:g} s; cpu_pct: of the scheduler, one core"
    )
    table = Table(*COLUMNS, "vllm_idle_pct")
    rows = []
    for state in itertools.product(flags.step_ms, flags.streams, flags.modes, flags.loads):
        step_ms, num_streams, is_async, load = state
        window = await measure(step_ms, num_streams, is_async=is_async, load=load, flags=flags)
        row = row_of(step_ms, num_streams, is_async, load, window)
        row["vllm_idle_pct"] = vllm_idle_pct(
            peer, step_ms, num_streams, is_async=is_async, load=load, seconds=flags.seconds
        )
        table.row(*row.values())
        rows.append(row)
    return {"executor": flags.executor, "rows": rows}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--executor", choices=("stub", "real"), default="stub")
    parser.add_argument("--step-ms", type=parse_numbers, default=[2, 5, 10, 25], metavar="N,N")
    parser.add_argument("--streams", type=parse_numbers, default=[8, 64], metavar="N,N")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each window")
    parser.set_defaults(modes=(False, True), loads=("steady", "changing"))
    flags = parser.parse_args()
    if flags.quick:
        flags.step_ms, flags.streams, flags.seconds = [5], [8], 0.5
        flags.modes, flags.loads = (True,), ("changing",)
    with contextlib.ExitStack() as stack:
        peer = None
        if flags.vllm_python:
            peer = stack.enter_context(VllmPeer(flags.vllm_python, "vllm_engine.py"))
        write_json(flags.json, asyncio.run(run(flags, peer)))


if __name__ == "__main__":
    main()
