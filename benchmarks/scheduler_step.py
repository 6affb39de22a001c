"""What one step costs the scheduler, in microseconds of a core, beside vLLM's own scheduler in the same run.

    python benchmarks/scheduler_step.py [--vllm-python PATH] [--json FILE] [--quick]

The state is a steady decode: `running` requests decode, prefix caching is on, nobody ends. Columns, medians per step:

- `holdback_us`: the core alone, `schedule()` and `update_from_output()`.
- `holdback_wire_us`: the whole scheduler but sockets, from the bytes of a `ModelRunnerOutput` in to the bytes of the
  next `SchedulerOutput` and of the gateway's message out (memory_grpc.py).
- `vllm_us`: vLLM's `schedule()` and `update_from_output()`; `AsyncScheduler` where `async` is yes.

`waiting` requests find every slot taken. In the rows that name a rule of `kv_admission` one request waits that has a
slot and that this rule refuses at every step; it is asked afresh each time. All rows of one size are built first and
then measured in turn, a few steps at a time. The ratios, to vLLM and to an empty queue, are medians over the turns, so
that they mean something on a machine that does other things too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import statistics
from dataclasses import dataclass, field

from report import Table, parse_numbers, parser_of, write_json
from step_benches import Bench, CoreBench, Variant, VllmBench, WireBench
from vllm_peer import VllmPeer

from holdback.telemetry import configure_logging
from scheduler_svc.core.config import KvAdmission

NAMES = ("holdback_us", "holdback_wire_us", "vllm_us")
RATIOS = ("core/vllm", "wire/vllm", "core/empty", "wire/empty")
NUM_COLD_STEPS = 3  # of each turn, not counted


@dataclass
class Row:
    """All benches of one variant, and what they took: the steps of each turn."""

    variant: Variant
    benches: dict[str, Bench]
    turns: dict[str, list[list[float]]] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        return statistics.median(itertools.chain(*self.turns[name])) if name in self.turns else None

    def over(self, name: str, other: Row, other_name: str) -> float | None:
        """How many times that of another one it takes: the median over the turns, in each of which both ran."""
        turns = zip(self.turns.get(name, ()), other.turns.get(other_name, ()), strict=False)
        ratios = [statistics.median(own) / statistics.median(others) for own, others in turns]
        return statistics.median(ratios) if ratios else None

    def to_json(self) -> dict[str, object]:
        variant = self.variant
        row: dict[str, object] = {"running": variant.running, "waiting": variant.waiting, "async": variant.is_async}
        if variant.refused_by is not None:
            row["refused_by"] = variant.refused_by.value
        return row | {name: self.median(name) for name in NAMES}

    def ratios(self, empty: Row) -> list[float | None]:
        """Its shares of vLLM's time, and its times over those of an empty queue: core and wire of each."""
        ours = NAMES[:2]
        return [*(self.over(name, self, NAMES[2]) for name in ours), *(self.over(name, empty, name) for name in ours)]


async def measure(variants: list[Variant], flags: argparse.Namespace, peer: VllmPeer | None) -> list[Row]:
    """Builds all variants of one size, then runs them in turn."""
    rows = []
    async with contextlib.AsyncExitStack() as stack:
        for variant in variants:
            wire = WireBench(variant)
            await wire.start()
            stack.push_async_callback(wire.stop)
            stack.callback(wire.check)
            benches: dict[str, Bench] = {"holdback_us": CoreBench(variant), "holdback_wire_us": wire}
            if peer is not None:
                vllm = VllmBench(variant, peer, flags.rounds * (NUM_COLD_STEPS + flags.steps))
                stack.callback(vllm.stop)
                benches["vllm_us"] = vllm
            rows.append(Row(variant, benches))
        for turn in range(flags.rounds):
            order = rows[turn % len(rows) :] + rows[: turn % len(rows)]
            for name in rows[0].benches:
                for row in order:
                    took = await row.benches[name].run(NUM_COLD_STEPS + flags.steps)
                    row.turns.setdefault(name, []).append(took[NUM_COLD_STEPS:])
    return rows


def print_rows(table: Table, rows: list[Row]) -> None:
    for row in rows:
        variant = row.variant
        times = [row.median(name) for name in NAMES]
        waiting = str(variant.refused_by or variant.waiting)
        table.row(variant.running, waiting, variant.is_async, *times, *row.ratios(rows[0]))


async def run(flags: argparse.Namespace, peer: VllmPeer | None) -> dict[str, object]:
    print(f"microseconds of processor time per step, medians of {flags.rounds} times {flags.steps} steps")
    table = Table("running", "waiting, or refused by", "async", *NAMES, *RATIOS)
    rows: list[Row] = []
    ratios: list[dict[str, object]] = []
    for running in flags.running:
        for is_async in (False, True):
            variants = [Variant(running, waiting, is_async) for waiting in flags.waiting]
            variants += [Variant(running, 0, is_async, refused_by=rule) for rule in KvAdmission]
            measured = await measure(variants, flags, peer)
            print_rows(table, measured)
            rows += measured
            ratios += [row.to_json() | dict(zip(RATIOS, row.ratios(measured[0]), strict=True)) for row in measured]
    return {
        "rows": [row.to_json() for row in rows if not row.variant.is_refused],
        "refused_head": [row.to_json() for row in rows if row.variant.is_refused],
        "ratios": ratios,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--running", type=parse_numbers, default=[8, 64, 256], metavar="N,N")
    parser.add_argument("--waiting", type=parse_numbers, default=[0, 1000, 10_000], metavar="N,N", help="0 first")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20, help="steps of each row in each round")
    flags = parser.parse_args()
    configure_logging("benchmark", "error")
    if flags.quick:
        flags.running, flags.waiting, flags.rounds = [8, 64], [0, 1000], 3
    with contextlib.ExitStack() as stack:
        peer = None
        if flags.vllm_python:
            peer = stack.enter_context(VllmPeer(flags.vllm_python, "vllm_scheduler.py"))
        write_json(flags.json, asyncio.run(run(flags, peer)))


if __name__ == "__main__":
    main()
