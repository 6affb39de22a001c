"""Whether KV memory allows one more request, so that everything admitted can run to its end without preemption (K3).

A policy is asked for the head of the queue, between prefills only, and again in every `schedule()`; it decides from
what runs now. Whatever it admits must keep two promises: no decode step ever lacks a block, and the prompt's blocks
can be taken chunk by chunk. In the same state `reserved` admits everything that `max_model_len` admits, and `phased`
(`phased.py`) everything that `reserved` admits.

The scheduler tells a policy of everything that changes what the running requests may need, so that an answer need not
be worked out from all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdback.buckets import blocks_for
from holdback.errors import InternalError
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request


class AdmissionPolicy:
    """One rule of admission by KV memory, for one lane since the executor was told nothing yet.

    The scheduler calls everything but `why_not` and `check_integrity` from inside `schedule()` and
    `update_from_output()`, and nobody else does.
    """

    def why_not(self, request: Request, running: Sequence[Request]) -> str | None:
        """Why `request` cannot join `running` now, in words with the numbers that decide; None when it can.

        Called in each step with a waiting head while nobody prefills, so its cost must not grow with what waits.
        """
        raise NotImplementedError

    def bind(self, request: Request) -> None:
        """`request` is about to get its hit and its first chunk. Raises InternalError when that was not allowed."""

    def start_decode(self, request: Request) -> None:
        """The last chunk of `request` is scheduled."""

    def count_decode_step(self, num_rows: int) -> None:
        """A decode step of `num_rows` rows is scheduled."""

    def release(self, request: Request) -> None:
        """`request` is about to give its blocks back."""

    def peak_blocks(self, running: Sequence[Request]) -> int:
        """Most blocks that `running` may come to hold at once, by this rule; for people."""
        raise NotImplementedError

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Compares what the policy remembers with `running`. Raises InternalError."""


class MaxModelLenAdmission(AdmissionPolicy):
    """K1's bound: every running request may grow to `max_model_len`, so only so many run at once.

    Attributes:
        max_kv_concurrent: how many.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.max_kv_concurrent = config.max_kv_concurrent
        self._num_blocks = blocks_for(config.max_model_len, config.block_size)

    def why_not(self, request: Request, running: Sequence[Request]) -> str | None:
        if len(running) < self.max_kv_concurrent:
            return None
        return f"{len(running)} requests run; KV memory holds {self.max_kv_concurrent} of max_model_len"

    def peak_blocks(self, running: Sequence[Request]) -> int:
        return len(running) * self._num_blocks


class ReservedAdmission(AdmissionPolicy):
    """Every running request may grow to its own `max_tokens`; the sum of these worst cases fits the pool.

    Attributes:
        num_reserved: blocks that the running requests may grow to.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.num_reserved = 0

    def why_not(self, request: Request, running: Sequence[Request]) -> str | None:
        needed, usable = self._worst_case(request), self._config.num_usable_blocks
        if self.num_reserved + needed <= usable:
            return None
        return f"the running requests may need {self.num_reserved} blocks and this one {needed}; {usable} are usable"

    def peak_blocks(self, running: Sequence[Request]) -> int:
        return self.num_reserved

    def bind(self, request: Request) -> None:
        self.num_reserved += self._worst_case(request)

    def release(self, request: Request) -> None:
        self.num_reserved -= self._worst_case(request)

    def check_integrity(self, running: Sequence[Request]) -> None:
        expected = sum(map(self._worst_case, running))
        if self.num_reserved != expected or expected > self._config.num_usable_blocks:
            usable = self._config.num_usable_blocks
            raise InternalError(f"{self.num_reserved} blocks are reserved, {expected} may be needed, {usable} usable")

    def _worst_case(self, request: Request) -> int:
        return blocks_for(last_computed(request, self._config.max_model_len), self._config.block_size)


def last_computed(request: Request, max_model_len: int) -> int:
    """Most tokens of a request that are ever computed, also before K10 has cut its `max_tokens`."""
    return min(request.last_computed, max_model_len - 1)
