"""How long devices stand idle: a load of streams, a window of time, and the sum that `device_idle` reports.

For the steps of one executor, in order: `end(k) = max(end(k - 1), arrival(k)) + latency(k)`, and the device is idle for
`max(0, arrival(k + 1) - end(k))` before step k + 1. Work is runnable throughout, as requests always run.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from executors import Records
from pool import Pool
from steady import MAX_MODEL_LEN, request_spec

STEPS_PER_CHANGE = 10
NUM_SETTLING_STEPS = 20
SLICE_S = 0.5


@dataclass(frozen=True)
class Idle:
    """What one window showed, over all executors.

    Attributes:
        share: idle time over all time, [0, 1].
        typical_share: the median of the shares of `SLICE_S` each: what a machine that does other things too does to a
            few of them is not in it.
        largest_gap_ms: the longest time that a device stood idle at once.
        num_steps: in the window.
    """

    share: float
    typical_share: float
    largest_gap_ms: float
    num_steps: int


def idle_of(executors: Sequence[Records], start_ns: int, stop_ns: int) -> Idle:
    """Raises ValueError when a device had fewer than two steps in the window."""
    gaps = []
    for records in executors:
        window = [record for record in records if start_ns <= record[0] <= stop_ns]
        if len(window) < 2:
            raise ValueError(f"a device had {len(window)} steps in the window; a longer one is needed")
        gaps.append(_gaps(window))
    slices: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for arrival_ns, idle_ns, span_ns in itertools.chain.from_iterable(gaps):
        slices[(arrival_ns - start_ns) // round(SLICE_S * 1e9)].append((idle_ns, span_ns))
    every = [pair for pairs in slices.values() for pair in pairs]
    largest_gap_ms = max(idle_ns for idle_ns, _ in every) / 1e6
    return Idle(_share(every), statistics.median(map(_share, slices.values())), largest_gap_ms, len(every))


def _gaps(window: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """For each step but the first: its arrival, the idle time before it, the time since the arrival before it."""
    gaps = []
    last_ns, latency_ns = window[0]
    end_ns = last_ns + latency_ns
    for arrival_ns, latency_ns in window[1:]:
        gaps.append((arrival_ns, max(0, arrival_ns - end_ns), arrival_ns - last_ns))
        end_ns = max(end_ns, arrival_ns) + latency_ns
        last_ns = arrival_ns
    return gaps


def _share(pairs: Sequence[tuple[int, int]]) -> float:
    return sum(idle_ns for idle_ns, _ in pairs) / sum(span_ns for _, span_ns in pairs)


class Load:
    """Keeps `num_streams` streams running.

    Where the membership changes, one request ends and another one joins in turn, a change every `STEPS_PER_CHANGE`
    steps: requests live until `2 * STEPS_PER_CHANGE` steps after the one before, and `STEPS_PER_CHANGE` steps after an
    end the next one is added. Steps are counted by tokens received. Many executors change each on their own, spread
    over the same steps.

    Attributes:
        num_added: requests so far.
    """

    def __init__(self, pool: Pool, num_streams: int, *, num_executors: int = 1, changes: bool = False) -> None:
        self._gateway = pool.gateway
        self._num_streams = num_streams
        self._num_executors = num_executors
        self._changes = changes
        self.num_added = 0
        self._joins: set[asyncio.Task[None]] = set()

    @property
    def num_steps(self) -> int:
        """Decode steps of each executor so far, about."""
        return self._gateway.num_tokens // (self._num_streams * self._num_executors)

    async def start(self) -> None:
        """Returns when all streams run and the first steps are over."""
        gateway = self._gateway
        gateway.on_end = self._ended
        for number in range(self._num_streams * self._num_executors):
            # Streams of one executor end one after the other; the lanes fill up side by side.
            order = number // self._num_executors
            self._add(NUM_SETTLING_STEPS + 2 * STEPS_PER_CHANGE * (order + 2) if self._changes else MAX_MODEL_LEN)
        num_streams = self._num_streams * self._num_executors
        await gateway.until(lambda: gateway.num_started >= num_streams)
        settled = self.num_steps + NUM_SETTLING_STEPS
        await gateway.until(lambda: self.num_steps >= settled)

    def stop(self) -> None:
        for join in self._joins:
            join.cancel()

    def _add(self, max_tokens: int) -> None:
        number = self.num_added
        self.num_added += 1
        self._gateway.add(number, request_spec(number, max_tokens))

    def _ended(self, handle: int) -> None:
        if self._changes:
            join = asyncio.ensure_future(self._join(self.num_steps + STEPS_PER_CHANGE))
            self._joins.add(join)
            join.add_done_callback(self._joins.discard)

    async def _join(self, at_step: int) -> None:
        await self._gateway.until(lambda: self.num_steps >= at_step)
        self._add(2 * STEPS_PER_CHANGE * self._num_streams - STEPS_PER_CHANGE)


@dataclass(frozen=True)
class Window:
    """What was seen while a load ran.

    Attributes:
        idle: of the devices.
        scheduler_cpu: processor time of the scheduler over time, 1 is a core; None where that is not known.
        gateway_cpu: the same of this process, which is the gateway.
        num_changes: requests that joined.
    """

    idle: Idle
    scheduler_cpu: float | None
    gateway_cpu: float
    num_changes: int


async def watch(pool: Pool, load: Load, seconds: float) -> Window:
    """Lets the load run for a while."""
    added, cpu_s, own_cpu_s = load.num_added, pool.scheduler_cpu_s(), time.process_time()
    start_ns = time.perf_counter_ns()
    await asyncio.sleep(seconds)
    stop_ns = time.perf_counter_ns()
    cpu_after_s, gateway_cpu_s = pool.scheduler_cpu_s(), time.process_time() - own_cpu_s
    num_changes = load.num_added - added
    idle = idle_of(await pool.records(), start_ns, stop_ns)
    took_s = (stop_ns - start_ns) / 1e9
    cpu = None if cpu_s is None or cpu_after_s is None else (cpu_after_s - cpu_s) / took_s
    return Window(idle, cpu, gateway_cpu_s / took_s, num_changes)
