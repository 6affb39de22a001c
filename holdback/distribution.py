"""How often a number fell where: a histogram that costs next to nothing to feed, whoever shows it in the end.

Nothing here knows of Prometheus, so what counts on a hot path needs no library for it. A distribution belongs to one
thread, or to whoever sees that two do not feed it at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Distribution:
    """Counts of numbers between bounds.

    Attributes:
        bounds: upper ones, inclusive, ascending; what is above the last is counted too.
        counts: one for each bound and one for what is above, not cumulative.
        sum: of all numbers.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Numbers so far."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add(self, other: Distribution) -> None:
        """Takes in the numbers of another one of the same bounds."""
        if other.bounds != self.bounds:
            raise ValueError(f"bounds are {other.bounds}; allowed: {self.bounds}")
        self.counts = [mine + more for mine, more in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
