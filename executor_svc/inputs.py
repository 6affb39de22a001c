"""Static-shape inputs: a prefill chunk or a decode batch, padded to a declared bucket.

The scheduler's counts are used as they are: `num_scheduled_tokens` real tokens in a tensor of
`num_scheduled_tokens_padded`; the batch of a decode is padded to the smallest of `num_seqs_buckets` that holds it.
Padding writes to the sink (slot -1) and reads the null block, so it touches nobody's memory. What each array holds
is said in `devices.base.StepInputs`.

The arrays are views into buffers that are used again two steps later: the step that runs and the step that is being
built never share one. A decode with the rows of the one before finds nearly all of its arrays already there, and only
moves positions on and enters the blocks that came since; so its cost hardly depends on the length of its contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from executor_svc.devices.base import Float32, GraphKey, Int32, Int64, SamplingInputs, StepInputs
from executor_svc.random_numbers import uniform_numbers
from executor_svc.requests import RunningRequests, refuse
from holdback.types import ExecutorLimits

NUM_BUFFERS = 2
"""Steps whose arrays may be in use at once."""

PADDING_TOKEN_ID = 0

NUM_STEPS_OF_RANDOM_NUMBERS = 16


class DecodeRows:
    """The rows of a decode, and what follows from them alone. Void once one of them is finished.

    Attributes:
        req_ids: in schedule order.
        slots: int64 [rows].
        table_starts: int64 [rows], where the row of each slot begins in the flat `RunningRequests.block_tables`.
        size: rows of the padded batch.
        params: of each row of the padded batch.
    """

    def __init__(self, requests: RunningRequests, req_ids: Sequence[str], size: int) -> None:
        """Raises InternalError for a request that is not known."""
        self.req_ids = list(req_ids)
        self.slots = np.array([requests.slot_of(req_id) for req_id in req_ids], np.int64)
        self.table_starts = self.slots * requests.block_tables.shape[1]
        self.size = size
        self.params = [*(requests.params[slot] for slot in self.slots.tolist()), *[None] * (size - len(self.slots))]
        self._seeds = requests.seeds[self.slots]
        self._uniform = np.zeros((0, size), np.float32)
        self._first_output = 0

    def uniform(self, num_outputs: Int64) -> Float32:
        """The random number of each row of the padded batch: float32 [size], not to be written to.

        They are made for several steps at once: while the rows stay the same, each step is one output further.
        """
        step = int(num_outputs[0]) - self._first_output
        if not 0 <= step < len(self._uniform):
            self._first_output, step = int(num_outputs[0]), 0
            self._uniform = np.zeros((NUM_STEPS_OF_RANDOM_NUMBERS, self.size), np.float32)
            indices = num_outputs + np.arange(NUM_STEPS_OF_RANDOM_NUMBERS)[:, None]
            self._uniform[:, : len(self.slots)] = uniform_numbers(self._seeds, indices)
        numbers: Float32 = self._uniform[step]
        return numbers


class _Buffers:
    """Arrays of the largest shapes; a step takes the front of each.

    Attributes:
        rows: the decode that the arrays were last filled for; None after a prefill.
        num_blocks: int64 [rows], blocks of each row that `block_tables` has.
    """

    def __init__(self, num_tokens: int, num_rows: int, table_width: int) -> None:
        self.input_ids = np.zeros(num_tokens, np.int32)
        self.positions = np.zeros(num_tokens, np.int32)
        self.slot_mapping = np.zeros(num_tokens, np.int32)
        self.block_tables = np.zeros((num_rows, table_width), np.int32)
        self.context_lens = np.zeros(num_rows, np.int32)
        self.slots = np.zeros(num_rows, np.int32)
        self.rows: DecodeRows | None = None
        self._flat_tables = self.block_tables.reshape(-1)
        self.num_blocks = np.zeros(0, np.int64)
        self._used = (0, 0)

    def fill_tables(self, requests: RunningRequests, slots: Int64, num_blocks: Int64) -> None:
        """The block tables of these slots from row 0 on; everything else becomes the null block."""
        width = int(num_blocks.max())
        self.block_tables[: self._used[0], : self._used[1]] = 0
        self.block_tables[: len(slots), :width] = requests.block_tables[:, :width].take(slots, axis=0)
        self._used = (len(slots), width)
        self.num_blocks = num_blocks

    def add_blocks(self, rows: DecodeRows, tables: Int32, num_blocks: Int64) -> None:
        """Enters the blocks that rows got since their tables were filled, one of each row at a time.

        Args:
            rows: of this step and of the one that the tables were filled for.
            tables: the flat `RunningRequests.block_tables`.
            num_blocks: int64 [rows], blocks of each row now.
        """
        behind = (num_blocks - self.num_blocks).nonzero()[0]
        if not behind.size:
            return
        to, places = behind * self.block_tables.shape[1], self.num_blocks[behind]
        num_missing = num_blocks[behind] - places
        start = rows.table_starts[behind]
        for number in range(int(num_missing.max())):
            # A row that has fewer gets its entries behind the last one, which are the null block.
            taken = np.minimum(places + number, self.block_tables.shape[1] - 1)
            self._flat_tables[to + taken] = tables[start + taken]
        self._used = (self._used[0], max(self._used[1], int(num_blocks.max())))
        self.num_blocks = num_blocks


class InputBuilder:
    """Builds the inputs of one step after the other from what runs.

    At most two steps may be in use at once: building a third writes over the arrays of the first.
    """

    def __init__(self, limits: ExecutorLimits, requests: RunningRequests) -> None:
        self._requests = requests
        self._block_size = limits.block_size
        self._padding_slot = limits.max_num_seqs
        num_rows = limits.num_seqs_buckets[-1]
        num_tokens = max(limits.num_batched_tokens_buckets[-1], num_rows)
        width = requests.block_tables.shape[1]
        self._flat_tables = requests.block_tables.reshape(-1)
        self._buffers = [_Buffers(num_tokens, num_rows, width) for _ in range(NUM_BUFFERS)]
        self._num_built = 0

    def _next_buffers(self) -> _Buffers:
        buffers = self._buffers[self._num_built % NUM_BUFFERS]
        self._num_built += 1
        return buffers

    def build_prefill(self, key: GraphKey, slot: int, num_tokens: int) -> StepInputs:
        """A chunk of `num_tokens` of the request in `slot`, from its `num_computed_tokens` on, padded to `key.size`."""
        requests, buffers, size = self._requests, self._next_buffers(), key.size
        start = int(requests.num_computed_tokens[slot])
        end = start + num_tokens
        input_ids, positions = buffers.input_ids[:size], buffers.positions[:size]
        input_ids[:num_tokens] = requests.prefill_token_ids(slot, start, end)
        input_ids[num_tokens:] = PADDING_TOKEN_ID
        positions[:num_tokens] = np.arange(start, end, dtype=np.int32)
        positions[num_tokens:] = end - 1
        slot_mapping = buffers.slot_mapping[:size]
        places, offsets = np.divmod(np.arange(start, end), self._block_size)
        slot_mapping[:num_tokens] = requests.block_tables[slot, places] * self._block_size + offsets
        slot_mapping[num_tokens:] = -1
        samples = end == requests.num_prefill_tokens[slot]
        buffers.rows = None
        buffers.fill_tables(requests, np.array([slot]), requests.num_blocks[slot : slot + 1])
        buffers.context_lens[0] = end
        buffers.slots[0] = slot if samples else self._padding_slot
        return StepInputs(
            key=key,
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=buffers.block_tables[:1],
            context_lens=buffers.context_lens[:1],
            num_tokens=num_tokens,
            slots=buffers.slots[:1],
            sampling=self._sample_prefill(slot) if samples else None,
        )

    def _sample_prefill(self, slot: int) -> SamplingInputs:
        requests = self._requests
        counted = requests.num_outputs[slot : slot + 1]
        uniform = uniform_numbers(requests.seeds[slot : slot + 1], counted)
        return SamplingInputs([requests.params[slot]], counted.astype(np.int32), uniform)

    def build_decode(self, key: GraphKey, rows: DecodeRows, num_computed_tokens: Int64) -> StepInputs:
        """One token for each row, padded to `key.size` rows.

        Args:
            key: the graph to run; its context holds every row.
            rows: which.
            num_computed_tokens: int64 [rows], what is computed of each.

        Raises:
            InternalError: a row's blocks do not reach its token.
        """
        buffers, num_rows, size = self._next_buffers(), len(rows.slots), rows.size
        num_blocks = self._requests.num_blocks[rows.slots]
        if buffers.rows is rows:
            buffers.add_blocks(rows, self._flat_tables, num_blocks)
        else:
            self._enter_rows(buffers, rows, num_blocks)
        places = num_computed_tokens // self._block_size
        blocks = self._flat_tables[rows.table_starts + places]
        if np.count_nonzero(blocks) < num_rows:  # the null block, where a table ends
            self._refuse_short(num_computed_tokens, num_blocks)
        buffers.positions[:num_rows] = num_computed_tokens
        buffers.context_lens[:num_rows] = num_computed_tokens + 1
        buffers.slot_mapping[:num_rows] = (blocks - places) * self._block_size + num_computed_tokens
        num_outputs = np.zeros(size, np.int32)
        counted = num_outputs[:num_rows] = self._requests.num_outputs[rows.slots]
        return StepInputs(
            key=key,
            positions=buffers.positions[:size],
            slot_mapping=buffers.slot_mapping[:size],
            block_tables=buffers.block_tables[:size],
            context_lens=buffers.context_lens[:size],
            num_tokens=num_rows,
            slots=buffers.slots[:size],
            sampling=SamplingInputs(rows.params, num_outputs, rows.uniform(counted)),
        )

    def _refuse_short(self, num_computed_tokens: Int64, num_blocks: Int64) -> NoReturn:
        held = num_blocks * self._block_size
        row = int((held <= num_computed_tokens).argmax())
        needed, limit = int(num_computed_tokens[row]) + 1, int(held[row])
        raise refuse(f"tokens in row {row}", needed, f"at most {limit}, what its blocks hold")

    def _enter_rows(self, buffers: _Buffers, rows: DecodeRows, num_blocks: Int64) -> None:
        """Fills what stays while the rows do: block tables, slots and padding."""
        num_rows, size = len(rows.slots), rows.size
        buffers.fill_tables(self._requests, rows.slots, num_blocks)
        buffers.positions[num_rows:size] = 0
        buffers.slot_mapping[num_rows:size] = -1
        buffers.context_lens[num_rows:size] = 0
        buffers.slots[:num_rows] = rows.slots
        buffers.slots[num_rows:size] = self._padding_slot
        buffers.rows = rows
