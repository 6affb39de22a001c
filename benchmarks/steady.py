"""A steady decode: executors, requests and answers that the benchmarks of a step share."""

from __future__ import annotations

from holdback import codec
from holdback.buckets import get_default_num_batched_tokens_buckets, get_default_num_seqs_buckets
from holdback.codec import StepDecoder
from holdback.types import (
    PROTOCOL_VERSION,
    ExecutorInfo,
    ExecutorLimits,
    GraphLatency,
    ModelInfo,
    ModelRunnerOutput,
    Phase,
    RequestSpec,
    SamplingParams,
    SchedulerOutput,
    StepTimings,
)
from holdback.v1 import executor_pb2, types_pb2

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 64  # and up to a block more, so that requests do not all need a block in the same step
MAX_MODEL_LEN = 4096
MAX_NUM_BATCHED_TOKENS = 512
VOCAB_SIZE = 32_000
EOS_TOKEN_IDS = (2,)
TOKEN = 1000
LATENCY_US = 10_000
VERSION = types_pb2.ProtocolVersion(major=PROTOCOL_VERSION[0], minor=PROTOCOL_VERSION[1])


def executor_info(
    max_num_seqs: int,
    num_at_full_length: int,
    *,
    executor_id: str = "executor-0",
    lease: str = "a lease of 16 to 64 bytes",
    port: int = 1,
    decode_us: int = LATENCY_US,
    prefill_us: int = LATENCY_US,
) -> ExecutorInfo:
    """An executor with blocks for just so many requests of `MAX_MODEL_LEN`. Every prefill takes the same time."""
    sizes = tuple(get_default_num_batched_tokens_buckets(MAX_NUM_BATCHED_TOKENS))
    rows = tuple(get_default_num_seqs_buckets(max_num_seqs))
    return ExecutorInfo(
        executor_id=executor_id,
        lease=lease,
        port=port,
        model=ModelInfo("steady", "steady", VOCAB_SIZE, EOS_TOKEN_IDS, MAX_MODEL_LEN),
        limits=ExecutorLimits(
            block_size=BLOCK_SIZE,
            num_blocks=1 + num_at_full_length * (MAX_MODEL_LEN // BLOCK_SIZE),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            num_batched_tokens_buckets=sizes,
            num_seqs_buckets=rows,
        ),
        latencies=(
            *(GraphLatency(Phase.PREFILL, size, MAX_MODEL_LEN, prefill_us) for size in sizes),
            *(GraphLatency(Phase.DECODE, size, MAX_MODEL_LEN, decode_us) for size in rows),
        ),
        device="simulated",
    )


def request_spec(number: int, max_tokens: int = MAX_MODEL_LEN) -> RequestSpec:
    """A request with a prompt of its own; without `max_tokens` it may grow to `MAX_MODEL_LEN`."""
    num_prompt = NUM_PROMPT_TOKENS + number % BLOCK_SIZE
    prompt = [3 + (number * 31 + i) % 31_000 for i in range(num_prompt)]
    max_tokens = min(max_tokens, MAX_MODEL_LEN - num_prompt)
    return RequestSpec(f"request-{number}", prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=number))


class SamplingRows:
    """Counts the rows of each step that sample a token: all of a decode, those that a prefill completes."""

    def __init__(self) -> None:
        self._num_left: dict[str, int] = {}

    def count(self, output: SchedulerOutput) -> int:
        """To be called for every step, in order."""
        for req_id in output.finished_req_ids:
            self._num_left.pop(req_id, None)
        if output.phase is Phase.DECODE:
            return len(output.num_scheduled_tokens)
        for new in output.scheduled_new_reqs:
            num_known = len(new.spec.prompt_token_ids) + len(new.spec.output_token_ids)
            self._num_left[new.req_id] = num_known - new.num_computed_tokens
        for req_id, count in output.num_scheduled_tokens.items():
            self._num_left[req_id] -= count
        return sum(self._num_left[req_id] == 0 for req_id in output.num_scheduled_tokens)


class Answerer:
    """Answers steps as an executor must, without a device: one and the same token wherever a row samples."""

    def __init__(self) -> None:
        self._decoder = StepDecoder()
        self._rows = SamplingRows()

    def answer(self, message: executor_pb2.SchedulerOutput) -> executor_pb2.ModelRunnerOutput:
        output = self._decoder.decode(message)
        timings = StepTimings(queue_us=100, device_us=LATENCY_US, host_us=200)
        tokens = [TOKEN] * self._rows.count(output)
        return codec.encode_runner_output(ModelRunnerOutput(output.step, tokens, timings=timings))
