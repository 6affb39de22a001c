"""Whether KV memory allows one more request, so that everything admitted can run to its end without preemption (K3).

A policy is asked for the head of the queue, between prefills only, and again in every `schedule()`; it decides from
what runs now. Whatever it admits must keep two promises: no decode step ever lacks a block, and the prompt's blocks
can be taken chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from scheduler_svc.core.request import Request


class AdmissionPolicy(Protocol):
    """One rule of admission by KV memory."""

    def why_not(self, request: Request, running: Sequence[Request]) -> str | None:
        """Why `request` cannot join `running` now, in words with the numbers that decide; None when it can.

        Called in each step with a waiting head, so its cost must not grow with what waits.
        """
        ...


class MaxModelLenAdmission:
    """K1's bound: every running request may grow to `max_model_len`, so only so many run at once.

    Attributes:
        max_kv_concurrent: how many.
    """

    def __init__(self, max_kv_concurrent: int) -> None:
        self.max_kv_concurrent = max_kv_concurrent

    def why_not(self, request: Request, running: Sequence[Request]) -> str | None:
        if len(running) < self.max_kv_concurrent:
            return None
        return f"{len(running)} requests run; KV memory holds {self.max_kv_concurrent} of max_model_len"
