"""A device without a model: it waits as long as a graph would take and answers by arithmetic.

The token after the positions 0 to n - 1 is

    16 + (sum over p < n of (token_p + position_p) * (p + 1)) mod (vocab_size - 16)

where token_p and position_p are what was *written* into KV memory at the place where the block table says that
position p is. All is right when position_p is p, and then `expected_tokens` tells the answer with no device at all; a
wrong block, a block twice, a wrong position, a token left out or a write into somebody else's block change it. Tokens
below 16 are never the answer, so EOS ids below 16 never end a request and a test chooses when one does.

A step runs when the one before it has ended, not when it is launched: it reads its arrays, KV memory and `last_token`
then, as a device with two steps in flight does. So arrays that are written over too early, or a slot or block that
reaches its next owner before the last step of the one before, give a wrong answer or an error.

What is covered: shapes (anything but a declared graph is refused), KV memory with the sink, `last_token`, the count of
outputs of each slot, order of steps, time, failures on demand. What is not: sampling parameters other than
`num_logprobs` change nothing.

To answer for 256 rows in microseconds each block keeps two sums of its content, v = token + position at offset o:
`plain` is the sum of v, `weighted` the sum of v * (o + 1). As the j-th block of a table it adds weighted + j *
block_size * plain. The last visible block is summed entry by entry, for it may hold old content behind the visible.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from executor_svc.devices.base import Device, GraphKey, Int32, SamplingInputs, StepInputs, StepResult
from executor_svc.devices.shapes import check_shapes
from holdback.buckets import check_limits
from holdback.errors import ConfigError
from holdback.types import ExecutorLimits, ModelInfo, Phase, RequestSpec, SamplingParams, TokenLogprobs

Int64 = npt.NDArray[np.int64]

NUM_RESERVED_TOKENS = 16
"""Tokens below this are never an answer."""


def expected_tokens(prompt_token_ids: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What a correct system answers to a prompt on the simulated device: its first `num_tokens` outputs."""
    tokens = list(prompt_token_ids)
    total = sum((token + p) * (p + 1) for p, token in enumerate(tokens))
    for p in range(len(tokens), len(tokens) + num_tokens):
        token = NUM_RESERVED_TOKENS + total % (vocab_size - NUM_RESERVED_TOKENS)
        tokens.append(token)
        total += (token + p) * (p + 1)
    return tokens[len(prompt_token_ids) :]


@dataclass(frozen=True, slots=True)
class SimulatedLatencies:
    """How long a graph takes, microseconds.

    Attributes:
        prefill_us_per_token: for each token of the bucket, padding included, for padding costs what a token costs.
        decode_us: for a decode of any size.
        table: for the graphs in it, instead of the two above.
    """

    prefill_us_per_token: float = 1.0
    decode_us: int = 200
    table: Mapping[GraphKey, int] = field(default_factory=dict)

    def of(self, key: GraphKey) -> int:
        computed = round(self.prefill_us_per_token * key.size) if key.phase is Phase.PREFILL else self.decode_us
        return max(1, self.table.get(key, computed))


@dataclass(frozen=True, slots=True)
class SimulatedFaults:
    """Failures on demand, each set off by a token that a step computes (in a prefill chunk, or as a decode's input).

    Attributes:
        nan_token_id: the row fails as if its logits were not finite, and every later row that can see the token.
        error_token_id: the step raises RuntimeError, and so does every step behind it until `reset`.
        hang_token_id: the step does not end until the device is closed.
    """

    nan_token_id: int | None = None
    error_token_id: int | None = None
    hang_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class _Start:
    """A request that begins in a slot, with the outputs that it already has."""

    slot: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class _Launched:
    """A launched step, which is its own ticket."""

    inputs: StepInputs
    device_us: int
    done_at_s: float


class SimulatedDevice(Device):
    """See the module. Its timeline: a step ends its latency after the end of the step before it, or after its launch
    where that is later.

    Raises:
        ConfigError: limits that K1 or K2 refuse, or a vocabulary of fewer than 17 tokens.

    Attributes:
        kv_token_ids: int32 [num_blocks + 1, block_size], what was written; the last block is the sink.
        kv_positions: int32, the same shape.
        last_token: int32 [max_num_seqs + 1]; the last row takes what padding writes.
        num_outputs: int32 [max_num_seqs + 1], outputs of each slot's request; a step that says otherwise is refused.
    """

    kind = "simulated"

    def __init__(
        self,
        model: ModelInfo,
        limits: ExecutorLimits,
        latencies: SimulatedLatencies | None = None,
        faults: SimulatedFaults | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if model.vocab_size <= NUM_RESERVED_TOKENS:
            raise ConfigError(f"vocab_size is {model.vocab_size}; allowed: at least {NUM_RESERVED_TOKENS + 1}")
        check_limits(limits, model.max_model_len)
        self.model = model
        self.limits = limits
        self._latencies = latencies or SimulatedLatencies()
        self._faults = faults or SimulatedFaults()
        self._clock_s = clock_s
        self._sleep = sleep
        self._graphs = frozenset(self.declared_graphs())
        self._closed = threading.Event()
        self._busy_until_s = 0.0
        self._to_do: deque[_Start | _Launched] = deque()
        self._has_failed = False
        num_blocks = limits.num_blocks + 1
        self.kv_token_ids = np.zeros((num_blocks, limits.block_size), np.int32)
        self.kv_positions = np.zeros((num_blocks, limits.block_size), np.int32)
        self.last_token = np.zeros(limits.max_num_seqs + 1, np.int32)
        self.num_outputs = np.zeros(limits.max_num_seqs + 1, np.int32)
        self._plain = np.zeros(num_blocks, np.int64)
        self._weighted = np.zeros(num_blocks, np.int64)
        self._weights = np.arange(1, limits.block_size + 1, dtype=np.int64)

    def start_request(self, slot: int, spec: RequestSpec) -> None:
        """Of a request only its tokens and the number of its outputs count here."""
        self._to_do.append(_Start(slot, len(spec.output_token_ids)))

    def launch(self, inputs: StepInputs) -> object:
        check_shapes(inputs, self._graphs, self.limits, self.model.max_model_len)
        device_us = self._latencies.of(inputs.key)
        self._busy_until_s = max(self._clock_s(), self._busy_until_s) + device_us / 1e6
        launched = _Launched(inputs, device_us, self._busy_until_s)
        self._to_do.append(launched)
        return launched

    def collect(self, ticket: object) -> StepResult:
        """Runs the step and waits for its end. Raises RuntimeError for a step that fails on demand."""
        if not isinstance(ticket, _Launched):
            raise TypeError(f"ticket is {type(ticket).__name__}; allowed: what launch returned")
        while self._to_do and isinstance(item := self._to_do[0], _Start):
            self.num_outputs[item.slot] = item.num_outputs
            self._to_do.popleft()
        if not self._to_do or self._to_do[0] is not ticket:
            raise ValueError("ticket is not that of the oldest launched step; allowed: tickets in the order of launch")
        self._to_do.popleft()
        result = self._run(ticket)
        self._sleep(max(0.0, ticket.done_at_s - self._clock_s()))
        return result

    def reset(self) -> None:
        tables = (self.kv_token_ids, self.kv_positions, self.last_token, self.num_outputs, self._plain, self._weighted)
        for array in tables:
            array.fill(0)
        self._to_do.clear()
        self._has_failed = False

    def close(self) -> None:
        self._closed.set()

    def _run(self, step: _Launched) -> StepResult:
        if self._has_failed:
            raise RuntimeError("the simulated device failed in a step before this one")
        inputs = step.inputs
        token_ids = self.last_token[inputs.slots] if inputs.input_ids is None else inputs.input_ids
        computed = token_ids[: inputs.num_tokens]
        if self._contains(computed, self._faults.error_token_id):
            self._has_failed = True
            raise RuntimeError(f"the simulated device fails on token {self._faults.error_token_id}")
        if self._contains(computed, self._faults.hang_token_id):
            self._closed.wait()
        self._write(token_ids, inputs.positions, inputs.slot_mapping)
        result = StepResult(np.zeros(0, np.int32), device_us=step.device_us)
        if inputs.sampling is not None:
            self._sample(inputs, inputs.sampling, result)
        return result

    def _write(self, token_ids: Int32, positions: Int32, slot_mapping: Int32) -> None:
        block_size = self.limits.block_size
        places = np.where(slot_mapping < 0, self.limits.num_blocks * block_size, slot_mapping).astype(np.int64)
        self.kv_token_ids.reshape(-1)[places] = token_ids
        self.kv_positions.reshape(-1)[places] = positions
        blocks = places // block_size
        if len(blocks) > self.limits.max_num_seqs:
            blocks = np.unique(blocks)  # a chunk has many tokens in each block
        values = self.kv_token_ids[blocks].astype(np.int64) + self.kv_positions[blocks]
        self._plain[blocks] = values.sum(axis=1)
        self._weighted[blocks] = values @ self._weights

    def _sample(self, inputs: StepInputs, sampling: SamplingInputs, result: StepResult) -> None:
        num_rows = 1 if inputs.key.phase is Phase.PREFILL else inputs.num_tokens
        slots = inputs.slots[:num_rows]
        self._count_outputs(slots, sampling.num_outputs[:num_rows])
        tables, lengths = inputs.block_tables[:num_rows], inputs.context_lens[:num_rows].astype(np.int64)
        sums = self._context_sums(tables, lengths)
        token_ids = (NUM_RESERVED_TOKENS + sums % (self.model.vocab_size - NUM_RESERVED_TOKENS)).astype(np.int32)
        failed = self._rows_that_see(self._faults.nan_token_id, tables, lengths)
        token_ids[failed] = 0
        result.token_ids = token_ids
        result.failed_rows = failed.tolist()
        self.last_token[slots] = token_ids
        params = sampling.params[:num_rows]
        if any(row is not None and row.num_logprobs is not None for row in params):
            result.logprobs = [_certain(row, int(token)) for row, token in zip(params, token_ids, strict=True)]

    def _count_outputs(self, slots: Int32, told: Int32) -> None:
        """One output more for each slot. The padding row, which a warm-up uses, counts nothing."""
        differ = np.flatnonzero((self.num_outputs[slots] != told) & (slots != self.limits.max_num_seqs))
        if differ.size:
            row = int(differ[0])
            counted = self.num_outputs[slots[row]]
            raise ValueError(f"num_outputs of slot {slots[row]} is {told[row]}; allowed: {counted}, what was sampled")
        self.num_outputs[slots] = told + 1

    def _context_sums(self, tables: Int32, lengths: Int64) -> Int64:
        """The sum of the module's formula for each row: int64 [rows]."""
        block_size = self.limits.block_size
        num_full = np.maximum(lengths - 1, 0) // block_size
        width = int(num_full.max(initial=0))
        full_tables, index = tables[:, :width], np.arange(width)
        sums = self._weighted[full_tables] + index * block_size * self._plain[full_tables]
        total: Int64 = np.where(index < num_full[:, None], sums, 0).sum(axis=1)
        last = tables[np.arange(len(tables)), num_full]
        values = self.kv_token_ids[last].astype(np.int64) + self.kv_positions[last]
        places = num_full[:, None] * block_size + np.arange(block_size)
        total += np.where(places < lengths[:, None], values * (places + 1), 0).sum(axis=1)
        return total

    def _rows_that_see(self, token_id: int | None, tables: Int32, lengths: Int64) -> npt.NDArray[np.intp]:
        if token_id is None:
            return np.zeros(0, np.intp)
        seen = (self.kv_token_ids[tables] == token_id).reshape(len(tables), -1)
        seen &= np.arange(seen.shape[1]) < lengths[:, None]
        return np.flatnonzero(seen.any(axis=1))

    @staticmethod
    def _contains(token_ids: Int32, token_id: int | None) -> bool:
        return token_id is not None and bool((token_ids == token_id).any())


def _certain(params: SamplingParams | None, token_id: int) -> TokenLogprobs | None:
    """The log-probabilities of a token that had no alternative."""
    if params is None or params.num_logprobs is None:
        return None
    top = (token_id,) if params.num_logprobs else ()
    return TokenLogprobs(token_id, 0.0, top, (0.0,) * len(top))
