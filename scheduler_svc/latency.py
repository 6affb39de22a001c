"""What a step or a prompt costs on one executor, from the latencies that it measured of its graphs.

A device with context buckets has one graph for each, so a context takes the time of the smallest bucket that holds it.
A device whose kernel takes the context as data was timed at its smallest and largest context; between them time grows
linearly.
"""

from __future__ import annotations

import bisect

from holdback.buckets import get_bucket_for_count
from holdback.errors import ConfigError
from holdback.types import ExecutorInfo, ExecutorLimits, Phase, SchedulerOutput


class LatencyTable:
    """Expected device times, microseconds.

    Raises:
        ConfigError: a latency is below 1 µs, or a prefill bucket or decode batch has none.
    """

    def __init__(self, info: ExecutorInfo) -> None:
        self._limits = info.limits
        self._has_context_buckets = bool(info.limits.decode_context_length_buckets)
        self._curves: dict[tuple[Phase, int], list[tuple[int, int]]] = {}
        for entry in info.latencies:
            if entry.latency_us < 1:
                raise ConfigError(
                    f"latency_us of the {entry.phase.value} graph of size {entry.size}, context {entry.context} is "
                    f"{entry.latency_us}; allowed: at least 1"
                )
            self._curves.setdefault((entry.phase, entry.size), []).append((entry.context, entry.latency_us))
        for curve in self._curves.values():
            curve.sort()
        _require_all(self._curves, info.limits)

    def graph_us(self, phase: Phase, size: int, context: int) -> int:
        """Time of the graph of a declared `size` (prefill bucket or decode batch) at `context` tokens."""
        curve = self._curves[phase, size]
        index = bisect.bisect_left(curve, (context, 0))
        if index == len(curve):
            return curve[-1][1]
        if index == 0 or self._has_context_buckets or curve[index][0] == context:
            return curve[index][1]
        (low, low_us), (high, high_us) = curve[index - 1], curve[index]
        return low_us + (high_us - low_us) * (context - low) // (high - low)

    def prefill_us(self, num_tokens: int, num_cached_tokens: int) -> int:
        """Time to prefill `num_tokens` of which the first `num_cached_tokens` are in cached blocks, chunk by chunk."""
        largest = self._limits.num_batched_tokens_buckets[-1]
        total, computed = 0, num_cached_tokens
        while computed < num_tokens:
            chunk = min(largest, num_tokens - computed)
            bucket = get_bucket_for_count(chunk, self._limits.num_batched_tokens_buckets)
            total += self.graph_us(Phase.PREFILL, bucket, computed)
            computed += chunk
        return total

    def prefill_rate(self) -> PrefillRate:
        """What to expect before anything is measured: the largest bucket, full and without context."""
        largest = self._limits.num_batched_tokens_buckets[-1]
        return PrefillRate(largest, self.graph_us(Phase.PREFILL, largest, 0))

    def size_of(self, output: SchedulerOutput) -> int:
        """Tensor size of a step: its prefill bucket in tokens, or its decode batch in rows; 0 for an empty step."""
        if output.phase is Phase.DECODE:
            return get_bucket_for_count(len(output.num_scheduled_tokens), self._limits.num_seqs_buckets)
        return sum(output.num_scheduled_tokens_padded.values())

    def longest_us(self, phase: Phase | None, size: int) -> int:
        """Expected time of a step at the largest context: an upper bound, cheap to look up; 0 for an empty step."""
        return 0 if phase is None else self._curves[phase, size][-1][1]


class PrefillRate:
    """How fast an executor gets through prompts, as of late. Tokens from the prefix cache cost nothing, padding does.

    A mean over prefill steps; half of the weight is in the last 14.
    """

    KEPT = 0.95

    def __init__(self, num_tokens: int, us: int) -> None:
        self._num_tokens = float(num_tokens)
        self._us = float(us)

    @property
    def tokens_per_us(self) -> float:
        return self._num_tokens / self._us

    def add(self, num_tokens: int, us: int) -> None:
        """A prefill step got `num_tokens` further, hits included, in `us` of device time, >= 1."""
        self._num_tokens = self._num_tokens * self.KEPT + num_tokens
        self._us = self._us * self.KEPT + us


def _require_all(curves: dict[tuple[Phase, int], list[tuple[int, int]]], limits: ExecutorLimits) -> None:
    declared = [(Phase.PREFILL, size) for size in limits.num_batched_tokens_buckets]
    declared += [(Phase.DECODE, size) for size in limits.num_seqs_buckets]
    for phase, size in declared:
        if (phase, size) not in curves:
            raise ConfigError(f"latencies have no {phase.value} graph of size {size}; allowed: one for every bucket")
