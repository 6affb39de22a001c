"""Static-shape inputs: a prefill chunk or a decode batch, padded to a declared bucket.

The scheduler's counts are used as they are: `num_scheduled_tokens` real tokens in a tensor of
`num_scheduled_tokens_padded`; the batch of a decode is padded to the smallest of `num_seqs_buckets` that holds it.
Padding writes to the sink (slot -1) and reads the null block, so it touches nobody's memory. What each array holds
is said in `devices.base.StepInputs`.

The arrays are views into buffers that are used again two steps later: the step that runs and the step that is being
built never share one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from executor_svc.devices.base import Float32, GraphKey, Int32, SamplingInputs, StepInputs
from executor_svc.requests import RunningRequests
from holdback.types import ExecutorLimits

NUM_BUFFERS = 2
"""Steps whose arrays may be in use at once."""

PADDING_TOKEN_ID = 0

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_UINT24 = np.float32(2.0**-24)


def uniform_numbers(seeds: npt.NDArray[np.uint64], output_indices: Int32) -> Float32:
    """The random number of each output, from its seed and index alone: float32 [rows] in [0, 1), on a grid of 2**-24.

    It is the top 24 bits of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014) at
    place `output_index` of the sequence that starts from the mixed seed. The seed is mixed first so that seeds that
    differ by 1, as those of the n choices of one request do, share no part of a sequence.
    """
    steps = output_indices.astype(np.uint64) + np.uint64(1)
    bits = _mix(_mix(seeds + np.uint64(_GOLDEN_GAMMA)) + steps * np.uint64(_GOLDEN_GAMMA))
    return (bits >> np.uint64(40)).astype(np.float32) * _UINT24


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of splitmix64, a bijection of 64 bits."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class _Buffers:
    """Arrays of the largest shapes; a step takes the front of each."""

    def __init__(self, num_tokens: int, num_rows: int, table_width: int) -> None:
        self.input_ids = np.zeros(num_tokens, np.int32)
        self.positions = np.zeros(num_tokens, np.int32)
        self.slot_mapping = np.zeros(num_tokens, np.int32)
        self.block_tables = np.zeros((num_rows, table_width), np.int32)
        self.context_lens = np.zeros(num_rows, np.int32)
        self.slots = np.zeros(num_rows, np.int32)


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
        table = requests.block_tables[slot]
        slot_mapping[:num_tokens] = self._kv_slots(
            table[positions[:num_tokens] // self._block_size], positions[:num_tokens]
        )
        slot_mapping[num_tokens:] = -1
        samples = end == requests.num_prefill_tokens[slot]
        buffers.block_tables[0] = table
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
            sampling=self._sampling(np.array([slot]), 1) if samples else None,
        )

    def build_decode(self, key: GraphKey, rows: npt.NDArray[np.intp]) -> StepInputs:
        """One token for the request in each slot of `rows`, in that order, padded to `key.size` rows."""
        requests, buffers, size, num_rows = self._requests, self._next_buffers(), key.size, len(rows)
        positions, slot_mapping = buffers.positions[:size], buffers.slot_mapping[:size]
        tables, context_lens, slots = buffers.block_tables[:size], buffers.context_lens[:size], buffers.slots[:size]
        current = requests.num_computed_tokens[rows]
        positions[:num_rows] = current
        positions[num_rows:] = 0
        np.take(requests.block_tables, rows, axis=0, out=tables[:num_rows])
        tables[num_rows:] = 0
        slot_mapping[:num_rows] = self._kv_slots(requests.block_tables[rows, current // self._block_size], current)
        slot_mapping[num_rows:] = -1
        context_lens[:num_rows] = current + 1
        context_lens[num_rows:] = 0
        slots[:num_rows] = rows
        slots[num_rows:] = self._padding_slot
        return StepInputs(
            key=key,
            positions=positions,
            slot_mapping=slot_mapping,
            block_tables=tables,
            context_lens=context_lens,
            num_tokens=num_rows,
            slots=slots,
            sampling=self._sampling(rows, size),
        )

    def _kv_slots(self, block_ids: Int32, positions: Int32) -> Int32:
        return block_ids * np.int32(self._block_size) + positions % np.int32(self._block_size)

    def _sampling(self, rows: npt.NDArray[np.intp], size: int) -> SamplingInputs:
        """Fresh arrays, not buffers: a device may still count with them when the step is read."""
        requests, num_rows = self._requests, len(rows)
        num_outputs = np.zeros(size, np.int32)
        uniform = np.zeros(size, np.float32)
        num_outputs[:num_rows] = requests.num_outputs[rows]
        uniform[:num_rows] = uniform_numbers(requests.seeds[rows], num_outputs[:num_rows])
        params = [requests.params[row] for row in rows.tolist()]
        return SamplingInputs([*params, *[None] * (size - num_rows)], num_outputs, uniform)
