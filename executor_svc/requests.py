"""What the executor knows of the requests that run on it: one row of numpy tables per slot.

State is declared once, here, and changes in the order of a step's message: finished requests leave, new ones enter,
blocks are appended, counts advance when the step is launched. Everything that a launched step reads is copied out of
these tables first, so a row may be given to another request while that step still runs.
"""

from __future__ import annotations

import numpy as np

from executor_svc.devices.base import Int32
from executor_svc.random_numbers import mix_seed
from executor_svc.sampling_limits import check_sampling
from holdback.buckets import blocks_for
from holdback.errors import InternalError
from holdback.types import ExecutorLimits, ModelInfo, NewRequestData, RequestSpec, SamplingParams


def refuse(field: str, value: object, allowed: str) -> InternalError:
    """The error of a step that cannot be what a correct scheduler sends: `field is value; allowed: ...`."""
    return InternalError(f"{field} is {value}; allowed: {allowed}")


class RunningRequests:
    """The requests of one lease, by name and by slot. Counts are int64: such an array indexes another at once.

    Attributes:
        slots: slot of each request that runs.
        block_tables: int32 [max_num_seqs, ceil(max_model_len / block_size)]; unused entries are 0, the null block.
        num_blocks: int64 [max_num_seqs], used entries of each row of `block_tables`.
        num_computed_tokens: int64 [max_num_seqs], tokens that launched steps compute, prefix hits included.
        num_prefill_tokens: int64 [max_num_seqs], prompt and outputs that were told with the request.
        num_holders: int64 [num_blocks], block tables that a block is in; more than one where a prefix is shared.
        num_outputs: int64 [max_num_seqs], outputs that exist or that a launched step samples.
        seeds: uint64 [max_num_seqs], each request's seed as `random_numbers` wants it.
        params: by slot; None where no request is.
    """

    def __init__(self, limits: ExecutorLimits, model: ModelInfo) -> None:
        rows = limits.max_num_seqs
        width = blocks_for(model.max_model_len, limits.block_size)
        self._limits = limits
        self._model = model
        self.slots: dict[str, int] = {}
        self.block_tables = np.zeros((rows, width), np.int32)
        self.num_blocks = np.zeros(rows, np.int64)
        self.num_holders = np.zeros(limits.num_blocks, np.int64)
        self.num_computed_tokens = np.zeros(rows, np.int64)
        self.num_prefill_tokens = np.zeros(rows, np.int64)
        self.num_outputs = np.zeros(rows, np.int64)
        self.seeds = np.zeros(rows, np.uint64)
        self.params: list[SamplingParams | None] = [None] * rows
        self._num_hit_blocks = np.zeros(rows, np.int64)
        self._token_ids: list[Int32 | None] = [None] * rows

    def slot_of(self, req_id: str) -> int:
        """Raises InternalError for a request that is not known."""
        slot = self.slots.get(req_id)
        if slot is None:
            raise refuse("request", repr(req_id), "one that was told and has not finished")
        return slot

    def prefill_token_ids(self, slot: int, start: int, end: int) -> Int32:
        """Tokens [start, end) of the prompt and of the outputs that were told with the request: int32, a view."""
        token_ids = self._token_ids[slot]
        if token_ids is None:
            raise refuse("slot", slot, "one that a request has")
        return token_ids[start:end]

    def add(self, new: NewRequestData) -> None:
        """Enters a request.

        Raises:
            InternalError: a slot, blocks, tokens or counts that cannot be right.
            InvalidArgumentError: sampling parameters that cannot be.
        """
        slot, limits = new.slot, self._limits
        if new.req_id in self.slots:
            raise refuse("new request", repr(new.req_id), "a name that no running request has")
        if not 0 <= slot < limits.max_num_seqs:
            raise refuse("slot", slot, f"[0, {limits.max_num_seqs})")
        if self.params[slot] is not None:
            raise refuse("slot", slot, "one that no running request has")
        check_sampling(new.spec.sampling, self._model.vocab_size)
        token_ids = self._checked_token_ids(new.spec)
        computed = new.num_computed_tokens
        if not 0 <= computed < len(token_ids) or computed % limits.block_size:
            allowed = f"a multiple of {limits.block_size} below {len(token_ids)}, the tokens to prefill"
            raise refuse("num_computed_tokens", computed, allowed)
        self.slots[new.req_id] = slot
        self._token_ids[slot] = token_ids
        self.num_blocks[slot] = 0
        self._num_hit_blocks[slot] = computed // limits.block_size
        self.num_computed_tokens[slot] = computed
        self.num_prefill_tokens[slot] = len(token_ids)
        self.num_outputs[slot] = len(new.spec.output_token_ids)
        self.seeds[slot] = mix_seed(new.spec.sampling.seed)
        self.params[slot] = new.spec.sampling
        self.append_blocks(slot, new.block_ids)

    def _checked_token_ids(self, spec: RequestSpec) -> Int32:
        length = len(spec.prompt_token_ids) + len(spec.output_token_ids)
        if not spec.prompt_token_ids or length >= self._model.max_model_len:
            allowed = f"at least one of the prompt, and below {self._model.max_model_len}, max_model_len"
            raise refuse("tokens to prefill", length, allowed)
        token_ids = np.array([*spec.prompt_token_ids, *spec.output_token_ids], np.int64)
        outside = token_ids[(token_ids < 0) | (token_ids >= self._model.vocab_size)]
        if outside.size:
            raise refuse("token id", int(outside[0]), f"[0, {self._model.vocab_size})")
        return token_ids.astype(np.int32)

    def append_blocks(self, slot: int, block_ids: list[int]) -> None:
        """Appends to a request's block table.

        Only what a prefix hit holds, which is read and never written, may be in another table too.

        Raises:
            InternalError: a block is none, somebody else holds one that this request would write to, or there are too
                many of them.
        """
        used, num_blocks = int(self.num_blocks[slot]), self._limits.num_blocks
        end, width = used + len(block_ids), self.block_tables.shape[1]
        if end > width:
            raise refuse("blocks of one request", end, f"at most {width}, max_model_len")
        for block_id in block_ids:
            if not 1 <= block_id < num_blocks:
                raise refuse("block", block_id, f"[1, {num_blocks}); block 0 is the null block")
        num_read = max(0, int(self._num_hit_blocks[slot]) - used)
        if num_read:
            np.add.at(self.num_holders, block_ids[:num_read], 1)
        for block_id in block_ids[num_read:]:
            if self.num_holders[block_id]:
                raise refuse("block to write to", block_id, "one that no block table has")
            self.num_holders[block_id] = 1
        self.block_tables[slot, used:end] = block_ids
        self.num_blocks[slot] = end

    def remove(self, req_id: str) -> None:
        """Forgets a request; its slot and blocks are free. Raises InternalError for a request that is not known."""
        slot = self.slot_of(req_id)
        del self.slots[req_id]
        self.params[slot] = None
        self._token_ids[slot] = None
        table = self.block_tables[slot, : self.num_blocks[slot]]
        np.subtract.at(self.num_holders, table, 1)
        table[:] = 0
        self.num_blocks[slot] = 0

    def clear(self) -> None:
        """Forgets every request, those that a refused step left half entered too."""
        for req_id in list(self.slots):
            self.remove(req_id)
        self.num_holders[:] = 0
