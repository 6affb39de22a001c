"""The three rules of admission as they are stated, worked out from block tables alone, and faults to put into them."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from holdback.buckets import blocks_for
from scheduler_svc.core.admission import AdmissionPolicy
from scheduler_svc.core.neuron_scheduler import NeuronScheduler
from scheduler_svc.core.request import Request


class Fault(enum.Enum):
    """What a naive phased admission leaves out."""

    NO_LATE_STEPS = "a result that comes later (L)"
    NO_DECODES_BETWEEN = "decode steps between the chunks (D)"
    FIRST_HOLDER_ONLY = "the latest holder of a block"
    HITS_ARE_FREE = "a hit on a cached block that nobody holds takes it"


def max_model_len_admits(scheduler: NeuronScheduler, request: Request) -> bool:
    return len(scheduler.running) < scheduler.max_kv_concurrent


def reserved_admits(scheduler: NeuronScheduler, request: Request) -> bool:
    sizes = [min(r.last_computed, scheduler.config.max_model_len - 1) for r in (*scheduler.running, request)]
    return sum(blocks_for(size, scheduler.config.block_size) for size in sizes) <= scheduler.num_usable_blocks


def phased_admits(scheduler: NeuronScheduler, request: Request, fault: Fault | None = None) -> bool:
    return max(needed_blocks(scheduler, request, fault)) <= scheduler.num_usable_blocks


def needed_blocks(scheduler: NeuronScheduler, request: Request, fault: Fault | None = None) -> list[int]:
    """Blocks that may be needed after 0, 1, 2 ... more decode steps, with `request` as one more."""
    config, block_size = scheduler.config, scheduler.config.block_size
    num_late = 0 if fault is Fault.NO_LATE_STEPS else scheduler.max_steps_in_flight - 1
    hit = scheduler._hits.find(request).block_ids
    # (blocks it has, computed tokens, decode steps left, up to which step it holds them)
    curves = [
        (r.block_ids, r.num_computed_tokens, r.num_steps_left, r.num_steps_left + num_late if r.num_steps_left else 0)
        for r in scheduler.running
    ]
    num_computed = request.num_prefill_tokens
    num_left = min(request.last_computed, config.max_model_len - 1) - num_computed
    num_between = 0
    if config.max_decode_stall_ms is not None and fault is not Fault.NO_DECODES_BETWEEN:
        num_between = -(-(num_computed - len(hit) * block_size) // config.max_num_batched_tokens) - 1
    curves.append((hit, num_computed, num_left, num_left + num_late + num_between))
    free_hits = [block_id for block_id in hit if not scheduler.block_pool.is_held(block_id)]
    needed = []
    for step in range(1 + max(until for *_, until in curves)):
        alive = [curve for curve in curves if step <= curve[3]]
        if fault is Fault.FIRST_HOLDER_ONLY:
            held = _blocks_of_first_holders(scheduler, alive)
        else:
            held = {block_id for block_ids, *_ in alive for block_id in block_ids}
        total = len(held) + sum(
            blocks_for(computed + min(step, left), block_size) - len(block_ids)
            for block_ids, computed, left, _ in alive
        )
        needed.append(total - len(free_hits) if fault is Fault.HITS_ARE_FREE else total)
    return needed


def _blocks_of_first_holders(scheduler: NeuronScheduler, alive: Sequence[tuple[list[int], int, int, int]]) -> set[int]:
    """Held blocks, each counted only while the request that came first counts."""
    tables = [block_ids for block_ids, *_ in alive]
    counted = set()
    for block_id in {block_id for table in tables for block_id in table}:
        first = next(iter(scheduler.block_pool.holders(block_id)), None)
        if first is None or any(table is first.block_ids for table in tables):
            counted.add(block_id)
    return counted


class ReferenceAdmission(AdmissionPolicy):
    """`phased`, worked out anew each time, without any check of what it rests on."""

    def __init__(self, scheduler: NeuronScheduler, fault: Fault | None = None) -> None:
        self.scheduler = scheduler
        self.fault = fault

    def why_not(self, request: Request, running: Sequence[Request]) -> str | None:
        return None if phased_admits(self.scheduler, request, self.fault) else "the peak does not fit"
