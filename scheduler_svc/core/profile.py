"""How many blocks the decoding requests of a lane may hold at each decode step to come.

A request holds more and more blocks until its last token, and then none. So the sum over all of them is largest at the
end of one of them, and only those steps are kept, each with its sum:

    blocks  │         ╭──────┐  a                 at the end of a:  a + b + c
            │   ╭─────╯  ╭───┼──────╮─┐  b        at the end of b:  b + c
            │ ──╯  ╭─────╯   │   ╭──╯ └────┐  c   at the end of c:  c
            └──────────────────────────────────▶ decode steps of the lane

Steps are counted from when the executor was told nothing yet, so that a decode step changes no curve: every decode
step has every request that is not at its last token. A request that comes or goes changes as many sums as there are
ends before its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from scheduler_svc.core.request import Request


class Curve(NamedTuple):
    """The blocks of one request: `(offset + min(step, last)) // block_size` at each `step` up to `end`, then none.

    Attributes:
        offset: its computed tokens minus the decode steps so far, which no decode step changes, and block_size - 1.
        last: the decode step that computes its last token.
        end: the last decode step that may find its blocks still held.
    """

    offset: int
    last: int
    end: int


class Overflow(NamedTuple):
    """A step at which more blocks may be needed than there are.

    Attributes:
        step: which.
        num_blocks: that may be needed then, those of the request in question included.
        valid_before: up to here, no curve ends after `step`; `step` itself where a curve ends there.
    """

    step: int
    num_blocks: int
    valid_before: int


class Profile:
    """The curves of requests, and the blocks in use at the end of each.

    A block that several requests hold counts once, until the last of them ends. Who adds, removes or asks says which
    blocks of the request are counted for somebody else anyway, as the step until which that holds for each of them.

    Attributes:
        curves: of the requests that are in.
        ends: the steps at which a curve ends, ascending.
        used: parallel to it, blocks in use at that step.
    """

    def __init__(self, block_size: int) -> None:
        self.curves: dict[Request, Curve] = {}
        self.ends: list[int] = []
        self.used: list[int] = []
        self._num_ending: dict[int, int] = {}
        self._block_size = block_size

    def add(self, request: Request, curve: Curve, shared_until: Sequence[int] = ()) -> None:
        """Lets a request in. `shared_until` is ascending."""
        num_before = bisect_right(self.ends, curve.end)
        if curve.end not in self._num_ending:
            self.used.insert(num_before, self._used_between(curve.end, num_before))
            self.ends.insert(num_before, curve.end)
            num_before += 1
        needed = self._needed(curve, shared_until, num_before)
        self.used[:num_before] = [used + more for used, more in zip(self.used, needed, strict=False)]
        self._num_ending[curve.end] = self._num_ending.get(curve.end, 0) + 1
        self.curves[request] = curve

    def remove(self, request: Request, shared_until: Sequence[int] = ()) -> Curve:
        """Takes a request out. `shared_until` is ascending. Returns its curve."""
        curve = self.curves.pop(request)
        num_before = bisect_right(self.ends, curve.end)
        needed = self._needed(curve, shared_until, num_before)
        self.used[:num_before] = [used - less for used, less in zip(self.used, needed, strict=False)]
        self._num_ending[curve.end] -= 1
        if not self._num_ending[curve.end]:
            del self._num_ending[curve.end], self.ends[num_before - 1], self.used[num_before - 1]
        return curve

    def find_overflow(self, curve: Curve, shared_until: Sequence[int], limit: int) -> Overflow | None:
        """The step with the most blocks, if they are more than `limit`, with one request more; else None.

        A request alone must fit, so the end of a curve behind all others needs no look.
        """
        num_before = bisect_right(self.ends, curve.end)
        needed = self._needed(curve, shared_until, num_before)
        totals = [used + more for used, more in zip(self.used, needed, strict=False)]
        most = max(totals, default=0)
        if most > limit:
            step = self.ends[totals.index(most)]
            return Overflow(step, most, step)
        if num_before == len(self.ends) or curve.end in self._num_ending:
            return None
        needed_at_end = self.blocks_at(curve, curve.end) - _num_from(shared_until, curve.end)
        if self.used[num_before] + needed_at_end <= limit:
            return None
        most = self._used_between(curve.end, num_before) + needed_at_end
        return Overflow(curve.end, most, self.ends[num_before]) if most > limit else None

    def blocks_at(self, curve: Curve, step: int) -> int:
        return (curve.offset + min(step, curve.last)) // self._block_size

    def _needed(self, curve: Curve, shared_until: Sequence[int], num_ends: int) -> list[int]:
        """Blocks that a request adds to each of the first ends."""
        offset, last, _ = curve
        block_size, ends = self._block_size, self.ends[:num_ends]
        needed = [(offset + (step if step < last else last)) // block_size for step in ends]
        if not shared_until:
            return needed
        return [count - _num_from(shared_until, step) for count, step in zip(needed, ends, strict=True)]

    def _used_between(self, step: int, index: int) -> int:
        """Blocks in use at a step between two ends; `index` is that of the end behind it.

        No curve ends between, so they are fewer than at that end by what grows between.
        """
        if index == len(self.ends):
            return 0
        block_size, behind = self._block_size, self.ends[index]
        grown = 0
        for offset, last, _ in self.curves.values():
            if last > step:
                grown += (offset + (behind if behind < last else last)) // block_size - (offset + step) // block_size
        return self.used[index] - grown


def _num_from(steps: Sequence[int], first: int) -> int:
    """How many of the ascending `steps` are at or after `first`."""
    return len(steps) - bisect_left(steps, first)
