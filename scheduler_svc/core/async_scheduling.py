"""A second step in flight: step N + 1 is scheduled before the tokens of step N are known.

Between a step and its result a request has an output placeholder: a token that the step in flight samples and that the
next one computes, read on the device from the request's slot. Placeholders are not stored; `num_output_placeholders`
follows from what is computed and what is known, so it cannot run away from them. What the second step changes (K8):

- a request that is scheduled up to its last allowed token is not scheduled again, and keeps slot and blocks until the
  result of that step is applied;
- a request that ends by EOS, stop or abort may be in a later step already sent. Its row there is thrown away. Slot and
  blocks are free at once: an executor runs steps strictly in order, so the late write lands before anything of the next
  owner;
- an output block is offered by the prefix cache when the result of the step that computed its last token is applied.
"""

from __future__ import annotations

from typing import ClassVar

from holdback.types import SchedulerOutput
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from scheduler_svc.core.scheduler import Scheduler


class AsyncScheduler(Scheduler):
    """`Scheduler` with one step more in flight.

    The row loop of the base already counts ahead of what is known and stops at the last allowed token; with one step in
    flight it never gets that far. An executor that cannot promise strict order of steps reports depth 1 and gets a
    scheduler without this class.
    """

    max_steps_in_flight: ClassVar[int] = 2


class NeuronAsyncScheduler(NeuronScheduler, AsyncScheduler):
    """`NeuronScheduler` with one step more in flight."""

    def _call_base_schedule(self) -> SchedulerOutput:
        return AsyncScheduler.schedule(self)
