"""What a device must do, and the static-shape inputs it is given. The runner knows devices by this file alone.

A device owns weights, KV memory and a table `last_token` of `max_num_seqs` + 1 rows. It runs steps strictly in the
order of their launch. The shapes of `StepInputs` are always those of a declared graph: padding was done before.

KV memory has `num_blocks` + 1 blocks: the last one is the sink. Slot -1 of `slot_mapping` maps to it; nothing reads
it, so padding rows never touch block 0 or anybody's blocks. KV memory starts zeroed.
"""

from __future__ import annotations

import abc
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holdback.types import CompileCounts, ExecutorLimits, ModelInfo, Phase, RequestSpec, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from executor_svc.compile_cache import CompileCache

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GraphKey:
    """One compiled graph.

    Attributes:
        phase: prefill or decode.
        size: prefill bucket in tokens, or decode batch in rows.
        context: context bucket in tokens: of a prefill, what was computed before the chunk; of a decode, what is
            visible, the row's own token included. A device whose kernel takes the context length as data declares one
            graph per size, with `max_model_len` here, and is timed at its smallest and its largest context.
    """

    phase: Phase
    size: int
    context: int


@dataclass(slots=True)
class SamplingInputs:
    """How each row's token is drawn, parallel to the rows (1 in a prefill, the padded batch in a decode).

    Attributes:
        params: of each row; None for a padding row, whose token means nothing.
        num_outputs: int32 [rows], outputs of the request before this token; index of the token drawn.
        uniform: float32 [rows], in [0, 1): the row's random number, made on the host from (seed, output index).
    """

    params: list[SamplingParams | None]
    num_outputs: Int32
    uniform: Float32


@dataclass(slots=True)
class StepInputs:
    """One step with static shapes. T is the prefill bucket or the padded batch of a decode, B is 1 or that batch.

    Attributes:
        key: the graph to run.
        input_ids: int32 [T], prefill only; padding ids after the real tokens. A decode gathers its ids from
            `last_token` by `slots` on the device.
        positions: int32 [T]; prefill padding repeats the last position, decode padding rows have 0.
        slot_mapping: int32 [T], `block_id * block_size + offset` where each token's K and V go; -1 for padding.
        block_tables: int32 [B, ceil(max_model_len / block_size)]; unused entries are 0, the null block.
        context_lens: int32 [B], tokens whose K and V are visible once this step has written its own: computed before
            plus real tokens of the step; 0 for a padding row.
        num_tokens: real tokens of a prefill chunk, or real rows of a decode.
        slots: int32 [B], rows of `last_token`: read by a decode, and where the sampled token is written. Padding rows,
            and a prefill chunk that leaves tokens to compute, use row `max_num_seqs`.
        sampling: None for a prefill chunk that leaves tokens to compute; nothing is sampled then.
    """

    key: GraphKey
    positions: Int32
    slot_mapping: Int32
    block_tables: Int32
    context_lens: Int32
    num_tokens: int
    slots: Int32
    input_ids: Int32 | None = None
    sampling: SamplingInputs | None = None


@dataclass(slots=True)
class StepResult:
    """What a step produced.

    Attributes:
        token_ids: int32 [real rows that sampled]; a failed row has 0.
        logprobs: parallel to `token_ids`, None where not asked for; empty when no row asked.
        failed_rows: rows whose logits were not finite.
        device_us: time on the device, sampling included, >= 1.
    """

    token_ids: Int32
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    failed_rows: list[int] = field(default_factory=list)
    device_us: int = 1


class Device(abc.ABC):
    """One device group with a model on it.

    Steps overlap: `start_request` and `launch` are called by one thread while another waits in `collect`, and up to
    `limits.max_steps_in_flight` launched steps are not collected yet. The arrays of a step stay as they are until it is
    collected, so a device need not copy them. A device that cannot promise to run steps strictly in the order of their
    launch, each with the requests that were started before it, sets `max_steps_in_flight` to 1.

    Attributes:
        kind: "cpu", "neuron" or "simulated", for people and logs only.
        model: what it runs.
        limits: what it can hold.
        kernels: what computes and on how many threads, in words; empty where there is nothing to say.
        compile_cache: where its graphs are kept; warm-up asks it before it builds one. None where no graph is compiled.
        compiled: what its start compiled or found compiled; that of `compile_cache` where there is one. None where
            nothing ever is.
        num_weight_bytes: weights that this process holds.
    """

    kind: str
    model: ModelInfo
    limits: ExecutorLimits
    kernels: str = ""
    compile_cache: CompileCache | None = None
    compiled: CompileCounts | None = None
    num_weight_bytes: int = 0

    def declared_graphs(self) -> list[GraphKey]:
        """Every graph that may ever run; all are built and timed before the executor is ready.

        One for each prefill bucket and context bucket, context 0 included, and one for each decode batch and context
        bucket; with context as data, one for each prefill bucket and each decode batch.
        """
        contexts = self.limits.decode_context_length_buckets
        prefill_contexts = (0, *contexts) if contexts else (self.model.max_model_len,)
        decode_contexts = contexts or (self.model.max_model_len,)
        prefills = itertools.product(self.limits.num_batched_tokens_buckets, prefill_contexts)
        decodes = itertools.product(self.limits.num_seqs_buckets, decode_contexts)
        return [
            *(GraphKey(Phase.PREFILL, size, context) for size, context in prefills),
            *(GraphKey(Phase.DECODE, size, context) for size, context in decodes),
        ]

    @abc.abstractmethod
    def start_request(self, slot: int, spec: RequestSpec) -> None:
        """Tells of a request before its first chunk, so that what sampling counts for `slot` starts from it.

        The slot may still belong to a request that ended and has a row in a launched step. That row comes first.
        """

    @abc.abstractmethod
    def launch(self, inputs: StepInputs) -> object:
        """Starts a step and returns a ticket for `collect`, without waiting for the steps before it.

        Raises:
            ValueError: a shape that is not declared.
        """

    @abc.abstractmethod
    def collect(self, ticket: object) -> StepResult:
        """Waits for a launched step. Tickets are collected in the order of their launch. Raises what made it fail."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forgets every request and zeroes KV memory and `last_token`; for a new lease. Nothing is in flight."""

    def describe_wait(self) -> str:
        """What a step that does not return may wait for, in words, for the log; empty where there is nothing to say."""
        return ""

    def close(self) -> None:  # noqa: B027 - most devices hold nothing that outlives the object
        """Frees what the process would not free by ending."""
