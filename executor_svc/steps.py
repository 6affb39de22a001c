"""From a `SchedulerOutput` to the inputs of one step, or the reason why it cannot be run.

The scheduler's counts are used as they are. Those kept here only serve to refuse a step that contradicts them: it would
write into somebody's memory without any other sign.

The rows of a decode are mostly those of the decode before. What follows from them alone is kept until one of them is
finished, so that such a step is checked and built with a few operations on whole arrays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from executor_svc.devices.base import Device, StepInputs
from executor_svc.graphs import DeclaredGraphs
from executor_svc.inputs import DecodeRows, InputBuilder
from executor_svc.requests import RunningRequests, refuse
from holdback.buckets import get_bucket_for_count
from holdback.types import CachedRequestsData, Phase, SchedulerOutput


class StepBuilder:
    """Builds the inputs of one step after the other. At most two may be in use at once, as of `InputBuilder`."""

    def __init__(self, device: Device, requests: RunningRequests) -> None:
        self._limits = device.limits
        self._requests = requests
        self._graphs = DeclaredGraphs(device.declared_graphs())
        self._inputs = InputBuilder(device.limits, requests)
        self._rows: DecodeRows | None = None

    def forget_rows(self) -> None:
        """To be called when a request is removed: its row, and its slot, may be another's from now on."""
        self._rows = None

    def build(self, output: SchedulerOutput) -> StepInputs | None:
        """The inputs of a step whose changes have been applied; None when nothing is scheduled.

        Raises:
            InternalError: the step contradicts what runs, or no declared graph can run it.
        """
        if output.phase is None:
            if output.num_scheduled_tokens or output.scheduled_new_reqs or output.scheduled_cached_reqs.req_ids:
                raise refuse("phase", "none", "prefill or decode, for something is scheduled")
            return None
        req_ids = list(output.num_scheduled_tokens)
        self._check_told_once(output, req_ids)
        if output.phase is Phase.PREFILL:
            return self._build_prefill(output, req_ids)
        return self._build_decode(output, req_ids)

    def advance(self, output: SchedulerOutput, inputs: StepInputs) -> None:
        """Counts what a launched step computes and samples, before it is done."""
        requests = self._requests
        if inputs.key.phase is Phase.DECODE and self._rows is not None:
            requests.num_computed_tokens[self._rows.slots] += 1
            requests.num_outputs[self._rows.slots] += 1
            return
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            slot = requests.slot_of(req_id)
            requests.num_computed_tokens[slot] += num_tokens
            requests.num_outputs[slot] += inputs.sampling is not None

    def _check_told_once(self, output: SchedulerOutput, req_ids: list[str]) -> None:
        """Every row is told of exactly once."""
        cached = output.scheduled_cached_reqs
        if cached.req_ids == req_ids and not output.scheduled_new_reqs:
            return
        for req_id in req_ids:
            self._requests.slot_of(req_id)
        told = [*cached.req_ids, *(new.req_id for new in output.scheduled_new_reqs)]
        if len(told) != len(req_ids) or set(told) != set(req_ids):
            raise refuse("requests told", len(told), f"the {len(req_ids)} scheduled ones")

    def _build_prefill(self, output: SchedulerOutput, req_ids: list[str]) -> StepInputs:
        if len(req_ids) != 1:
            raise refuse("rows of a prefill", len(req_ids), "1")
        requests, req_id = self._requests, req_ids[0]
        slot, num_tokens = requests.slot_of(req_id), output.num_scheduled_tokens[req_id]
        cached = output.scheduled_cached_reqs
        start = int(requests.num_computed_tokens[slot])
        _check_computed(cached, [start] if cached.req_ids else [])
        size = output.num_scheduled_tokens_padded.get(req_id, 0)
        remaining = int(requests.num_prefill_tokens[slot]) - start
        if remaining <= 0:
            raise refuse(f"phase of {req_id!r}", "prefill", "decode, for all its tokens are computed")
        key = self._graphs.choose(Phase.PREFILL, size, start)
        if not 1 <= num_tokens <= min(size, remaining):
            allowed = f"[1, {min(size, remaining)}], at most the bucket {size} and the {remaining} left to prefill"
            raise refuse(f"num_scheduled_tokens of {req_id!r}", num_tokens, allowed)
        held = int(requests.num_blocks[slot]) * self._limits.block_size
        if held < start + num_tokens:
            raise refuse("tokens in row 0", start + num_tokens, f"at most {held}, what its blocks hold")
        return self._inputs.build_prefill(key, slot, num_tokens)

    def _build_decode(self, output: SchedulerOutput, req_ids: list[str]) -> StepInputs:
        scheduled, padded = output.num_scheduled_tokens, output.num_scheduled_tokens_padded
        _check_ones("num_scheduled_tokens", scheduled)
        if padded is not scheduled:
            _check_ones("num_scheduled_tokens_padded", padded)
        rows = self._rows
        if rows is None or rows.req_ids != req_ids:
            rows = self._rows = self._new_rows(req_ids)
        computed = self._requests.num_computed_tokens[rows.slots]
        counts = computed.tolist()
        cached = output.scheduled_cached_reqs
        _check_computed(cached, counts if cached.req_ids == req_ids else self._computed(cached.req_ids))
        key = self._graphs.choose(Phase.DECODE, rows.size, max(counts) + 1)
        return self._inputs.build_decode(key, rows, computed)

    def _new_rows(self, req_ids: list[str]) -> DecodeRows:
        """Rows that the decode before did not have. None of them has tokens left to prefill, now or ever after."""
        requests, limits = self._requests, self._limits
        if not 1 <= len(req_ids) <= limits.max_num_seqs:
            raise refuse("rows of a decode", len(req_ids), f"[1, {limits.max_num_seqs}]")
        rows = DecodeRows(requests, req_ids, get_bucket_for_count(len(req_ids), limits.num_seqs_buckets))
        left = requests.num_prefill_tokens[rows.slots] - requests.num_computed_tokens[rows.slots]
        prefilling = np.flatnonzero(left > 0)
        if prefilling.size:
            req_id = req_ids[int(prefilling[0])]
            raise refuse(f"phase of {req_id!r}", "decode", "prefill, for it has tokens left to prefill")
        return rows

    def _computed(self, req_ids: list[str]) -> list[int]:
        return [int(self._requests.num_computed_tokens[self._requests.slot_of(req_id)]) for req_id in req_ids]


def _check_computed(cached: CachedRequestsData, computed: list[int]) -> None:
    """Both sides agree on what was computed before; `computed` is what it was here."""
    if computed == cached.num_computed_tokens:
        return
    for req_id, ours, theirs in zip(cached.req_ids, computed, cached.num_computed_tokens, strict=False):
        if ours != theirs:
            raise refuse(f"num_computed_tokens of {req_id!r}", theirs, f"{ours}, what this executor computed")
    raise refuse("num_computed_tokens", len(cached.num_computed_tokens), f"{len(computed)} entries")


def _check_ones(field: str, counts: dict[str, int]) -> None:
    found: Sequence[int] = sorted(set(counts.values()))
    if found != [1]:
        raise refuse(f"{field} of a decode", found, "1 in each row")
