"""What the services say to each other, as plain Python.

These dataclasses carry the specification's names. They know nothing of the wire (`codec` alone does), of asyncio,
gRPC or torch, and they are shared: a field is defined here once and means the same in every process.

A request is named by `req_id`, a string that is unique in its scheduler for as long as anything remembers the
request. Token counts count tokens, positions start at 0, block 0 is the null block and never holds data.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PROTOCOL_VERSION = (1, 0)
"""(major, minor) of the step protocol and of both scheduler streams. Another major is refused, naming both."""


class FinishReason(enum.Enum):
    """Why a request ended. The values are the words that the OpenAI API and vLLM use."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SchedulerState(enum.Enum):
    """The state machine of one lane's scheduler; it changes in `schedule()` only (decision K5)."""

    IDLE = "IDLE"
    ACTIVE_PREFILL = "ACTIVE_PREFILL"
    ACTIVE_DECODE = "ACTIVE_DECODE"


class Phase(enum.Enum):
    """What one step, and so one compiled graph, does. A batch never mixes the two."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends. Values are already checked and complete.

    Attributes:
        temperature: 0 is greedy; otherwise logits are divided by it in float32.
        top_k: keep the k most likely tokens; None keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this, (0, 1]; 0 keeps one token.
        min_p: drop tokens less likely than this share of the most likely one, [0, 1].
        repetition_penalty: divides (multiplies, where negative) the logits of tokens in prompt and output, > 0.
        presence_penalty: subtracted from the logits of tokens in the output, [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, [-2, 2].
        seed: with the output index it determines each random number; signed 64 bit.
        max_tokens: most output tokens, counted from the first output of the request, >= 1.
        min_tokens: EOS and stop tokens are not sampled before this many outputs.
        ignore_eos: EOS ends nothing; `stop_token_ids` still do.
        stop_token_ids: tokens that end the request, in addition to EOS.
        allowed_token_ids: only these may be sampled; None allows all.
        logit_bias: added to the logits of these tokens.
        num_logprobs: log-probabilities of the chosen and of this many most likely tokens; None returns none.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TraceContext:
    """W3C trace context as the client sent it; empty strings where there is none."""

    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """All that is needed to run a request, also to run it again elsewhere from where it stands.

    Attributes:
        request_id: the client's or the gateway's id; unique among the living requests of one gateway session.
        generation: grows when a gateway submits the same request again; 0 at first.
        prompt_token_ids: at least one.
        output_token_ids: what was already produced before this submission; it is prefilled, not sampled again.
        sampling: `max_tokens` and `min_tokens` count from the first output, those in `output_token_ids` included.
        priority: lower is served first under the `priority` policy.
        cache_salt: requests share cached blocks only within one salt.
        deadline_ms: relative to the submission; None waits without limit.
        queued_ms: time that the request had already waited at earlier submissions.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    generation: int = 0
    output_token_ids: Sequence[int] = ()
    priority: int = 0
    cache_salt: str = ""
    deadline_ms: int | None = None
    queued_ms: int = 0
    trace: TraceContext = field(default_factory=TraceContext)


@dataclass(slots=True)
class NewRequestData:
    """A request that an executor is told about for the first time, in full.

    Attributes:
        req_id: the scheduler's name for it.
        spec: the request. Prefill covers prompt and `output_token_ids`.
        slot: row of the executor's `last_token` table, in [0, max_num_seqs); the request's until it is finished.
        block_ids: its block table so far: a prefix hit, then the blocks of the first chunk.
        num_computed_tokens: tokens that a prefix hit already holds; a multiple of the block size.
    """

    req_id: str
    spec: RequestSpec
    slot: int
    block_ids: list[int]
    num_computed_tokens: int = 0


@dataclass(slots=True)
class CachedRequestsData:
    """The scheduled requests that the executor knows, as parallel lists in schedule order.

    Attributes:
        req_ids: which.
        num_computed_tokens: computed before this step, steps in flight included.
        new_block_ids: blocks appended to each block table by this step; None where there is none.
    """

    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    new_block_ids: list[list[int] | None] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step: what runs now, and what the executor must know to run it.

    Schedule order is the order of `num_scheduled_tokens`; everything that is parallel to the batch follows it.

    Attributes:
        step: number of the step on its lane, from 0, without gaps among the steps sent.
        scheduled_new_reqs: requests scheduled for the first time on this lane.
        scheduled_cached_reqs: requests scheduled before.
        num_scheduled_tokens: req_id to tokens computed by this step. Padding is never in it.
        num_scheduled_tokens_padded: req_id to tensor size: the bucket of a prefill chunk, 1 for a decode row.
        finished_req_ids: requests that ended since the step before; the executor forgets them before it runs this step.
        phase: of the whole batch; None when nothing is scheduled.
    """

    step: int = 0
    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestsData = field(default_factory=CachedRequestsData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    num_scheduled_tokens_padded: dict[str, int] = field(default_factory=dict)
    finished_req_ids: list[str] = field(default_factory=list)
    phase: Phase | None = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one output position, before temperature and filters.

    Attributes:
        token_id: the chosen token.
        logprob: of the chosen token.
        top_token_ids: the most likely tokens, most likely first.
        top_logprobs: parallel to `top_token_ids`.
    """

    token_id: int
    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Where one step's time went in the executor, microseconds.

    Attributes:
        queue_us: from the arrival of the step until its launch.
        device_us: the graph, sampling included.
        host_us: building inputs and reading results.
    """

    queue_us: int = 0
    device_us: int = 0
    host_us: int = 0


@dataclass(slots=True)
class ModelRunnerOutput:
    """The result of one step.

    Attributes:
        step: of the `SchedulerOutput` that this answers.
        sampled_token_ids: one per row that samples, in schedule order. A prefill chunk that leaves tokens to compute
            samples nothing; every decode row and every last chunk samples one.
        logprobs: parallel to `sampled_token_ids`, None where not asked for; empty when no row asked.
        failed_rows: indices into the schedule order of rows whose logits were not finite; their token is 0.
    """

    step: int
    sampled_token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    failed_rows: list[int] = field(default_factory=list)
    timings: StepTimings = field(default_factory=StepTimings)


@dataclass(frozen=True, slots=True)
class GraphLatency:
    """Measured time of one compiled graph.

    Attributes:
        phase: prefill or decode.
        size: prefill bucket in tokens, or decode batch in rows.
        context: context bucket in tokens; 0 for a prefill without context.
        latency_us: device time, >= 1.
    """

    phase: Phase
    size: int
    context: int
    latency_us: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What every executor of a pool must agree on.

    Attributes:
        fingerprint: identifies weights and configuration.
        name: shown to people.
        vocab_size: token ids are in [0, vocab_size).
        eos_token_ids: tokens that end a request unless it ignores EOS.
        max_model_len: most tokens of prompt and output together.
    """

    fingerprint: str
    name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What one executor can hold and run. The executor owns these; the scheduler checks them (K1, K2) and obeys.

    Attributes:
        block_size: tokens per KV block.
        num_blocks: blocks in KV memory, the null block included and the sink not.
        max_num_seqs: requests that run at once; the largest of `num_seqs_buckets`.
        max_num_batched_tokens: most tokens of one prefill chunk.
        num_batched_tokens_buckets: prefill shapes, tokens, ascending.
        num_seqs_buckets: decode shapes, rows, ascending.
        decode_context_length_buckets: context shapes, tokens, ascending; empty when context is data to the kernel.
        max_steps_in_flight: 1 for a device that cannot promise strict order of steps, else 2.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_batched_tokens_buckets: tuple[int, ...]
    num_seqs_buckets: tuple[int, ...]
    decode_context_length_buckets: tuple[int, ...] = ()
    max_steps_in_flight: int = 2


@dataclass(slots=True)
class CompileCounts:
    """What the start of an executor had to compile: graphs, or a library of kernels.

    Attributes:
        num_hits: found in its compile cache.
        num_misses: not found, and so compiled.
        build_s: seconds that all of them took; loading those that were found included.
    """

    num_hits: int = 0
    num_misses: int = 0
    build_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an executor says of itself when it registers.

    Attributes:
        executor_id: stable name for people and logs.
        lease: random, fresh for every registration; an `Execute` stream must present it.
        port: where its `ExecutorService` listens, on the address that it dials from unless `advertise_address` is set.
        advertise_address: a literal IP to dial instead; empty for the peer address.
        device: "cpu", "neuron" or "simulated", for people.
        compiled: what its start had to compile; None for a device that compiles nothing.
        kernels: what computes and on how many threads, for people.
    """

    executor_id: str
    lease: str
    port: int
    model: ModelInfo
    limits: ExecutorLimits
    latencies: tuple[GraphLatency, ...] = ()
    advertise_address: str = ""
    device: str = ""
    compiled: CompileCounts | None = None
    kernels: str = ""
    protocol_version: tuple[int, int] = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `cached_tokens` are prompt tokens served from cached blocks."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens
