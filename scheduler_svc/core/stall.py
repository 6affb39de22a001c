"""How long decodes wait while prefills run, in expected device time.

    decode │ chunk │ chunk │ chunk │ decode │ chunk ...
            ╰───── the stall ─────╯

The stall of a lane is the sum of the expected device times of the steps scheduled since its last decode step. What the
executor measured replaces what was expected as soon as it is known. There is no clock in it, so that a replay decides
the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from holdback.types import Phase


class ExpectedTime(Protocol):
    """What is known beforehand of an executor's graphs."""

    def __call__(self, phase: Phase, size: int, context: int, /) -> int:
        """Device time of one step, microseconds, of a bucket of `size` with `context` tokens before it."""
        ...


@dataclass(slots=True)
class _Stall:
    """From one decode step to the next, microseconds.

    Attributes:
        total_us: of all prefill steps.
        measured_us: of those whose result is there, and that a decode had to wait for.
    """

    total_us: int = 0
    measured_us: int = 0


class _Waiting(NamedTuple):
    """A prefill step in flight."""

    stall: _Stall
    expected_us: int
    hides_decode: bool


class DecodeStall:
    """The present stall of one lane, and the largest one that there was.

    Attributes:
        max_us: the bound; None for none.
        num_prefill_steps: since the last decode step.
        max_stall_us: the longest that a request that could have decoded has waited, as measured.
    """

    def __init__(self, max_us: int | None) -> None:
        self.max_us = max_us
        self.num_prefill_steps = 0
        self.max_stall_us = 0
        self._stall = _Stall()
        self._in_flight: dict[int, _Waiting] = {}

    @property
    def stall_us(self) -> int:
        return self._stall.total_us

    def would_pass_bound(self, next_us: int) -> bool:
        """Whether one more prefill step would make the stall longer than allowed.

        Never for the first one after a decode step: one that passes the bound alone must run all the same.
        """
        if self.max_us is None or not self.num_prefill_steps:
            return False
        return self._stall.total_us + next_us > self.max_us

    def add_prefill_step(self, step: int, expected_us: int, *, hides_decode: bool) -> None:
        self.num_prefill_steps += 1
        self._stall.total_us += expected_us
        self._in_flight[step] = _Waiting(self._stall, expected_us, hides_decode)

    def add_decode_step(self) -> None:
        self.num_prefill_steps = 0
        self._stall = _Stall()

    def measure(self, step: int, device_us: int) -> None:
        """The result of a prefill step is there. 0 µs stands for not measured."""
        stall, expected_us, hides_decode = self._in_flight.pop(step)
        took_us = device_us or expected_us
        stall.total_us += took_us - expected_us
        if hides_decode:
            stall.measured_us += took_us
            self.max_stall_us = max(self.max_stall_us, stall.measured_us)
