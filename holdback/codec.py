"""Dataclasses to messages and back. The only module that knows the wire form of a step.

A step is encoded by a `StepEncoder` and decoded by a `StepDecoder`, one pair for each `Execute` stream. Both remember
the same two things: which handle stands for which request, and the rows of the last decode step. So a request is told
in full once, and a decode step with the rows of the decode before it is a few bytes at any batch size.

Decoders check what they cannot decode otherwise: order of steps, handles, rows, enums, lengths of parallel lists. What
a message means for a device is the runner's to check.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from holdback.errors import (
    ErrorReason,
    FailedPreconditionError,
    HoldbackError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from holdback.request_codec import (
    decode_finish_reason,
    decode_logprobs,
    decode_phase,
    decode_sampling,
    decode_spec,
    decode_state,
    decode_usage,
    encode_finish_reason,
    encode_logprobs,
    encode_phase,
    encode_sampling,
    encode_shared,
    encode_spec,
    encode_state,
    encode_usage,
    fill_spec,
)
from holdback.types import (
    CachedRequestsData,
    CompileCounts,
    ExecutorInfo,
    ExecutorLimits,
    GraphLatency,
    ModelInfo,
    ModelRunnerOutput,
    NewRequestData,
    Phase,
    SchedulerOutput,
    StepTimings,
    TokenLogprobs,
)
from holdback.v1 import errors_pb2, executor_pb2, scheduler_pb2, types_pb2

__all__ = [
    "StepDecoder",
    "StepEncoder",
    "decode_execution_failed",
    "decode_executor_info",
    "decode_finish_reason",
    "decode_logprobs",
    "decode_model_info",
    "decode_phase",
    "decode_runner_output",
    "decode_sampling",
    "decode_spec",
    "decode_state",
    "decode_usage",
    "encode_execution_failed",
    "encode_executor_info",
    "encode_finish_reason",
    "encode_logprobs",
    "encode_model_info",
    "encode_phase",
    "encode_runner_output",
    "encode_sampling",
    "encode_shared",
    "encode_spec",
    "encode_state",
    "encode_timings",
    "encode_usage",
    "fill_spec",
]


class StepEncoder:
    """Encodes the steps of one `Execute` stream, in the order in which they are sent. Counts them on the wire."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._next_handle = 0
        self._handles: dict[str, int] = {}
        self._last_decode: list[str] | None = None

    def encode(self, output: SchedulerOutput) -> executor_pb2.SchedulerOutput:
        """The message of one step. Requests that finished before the executor heard of them are not told."""
        message = executor_pb2.SchedulerOutput(step=self._num_steps, phase=encode_phase(output.phase))
        self._num_steps += 1
        for req_id in output.finished_req_ids:
            handle = self._handles.pop(req_id, None)
            if handle is not None:
                message.finished_handles.append(handle)
                # The id may come back under another handle; then equal ids are not the same rows.
                self._last_decode = None
        for new in output.scheduled_new_reqs:
            self._encode_new(new, message.new_requests.add())
        if output.scheduled_cached_reqs.req_ids:
            self._encode_cached(output, message.cached_requests)
        if output.phase is Phase.PREFILL:
            message.num_scheduled_tokens.extend(output.num_scheduled_tokens.values())
            message.num_scheduled_tokens_padded.extend(output.num_scheduled_tokens_padded.values())
        return message

    def _encode_new(self, new: NewRequestData, message: executor_pb2.NewRequestData) -> None:
        message.handle = self._handles[new.req_id] = self._next_handle
        self._next_handle += 1
        message.slot = new.slot
        message.spec.CopyFrom(encode_spec(new.spec))
        message.block_ids.extend(new.block_ids)
        message.num_computed_tokens = new.num_computed_tokens

    def _encode_cached(self, output: SchedulerOutput, message: executor_pb2.CachedRequestsData) -> None:
        cached = output.scheduled_cached_reqs
        for row in itertools.compress(itertools.count(), cached.new_block_ids):
            block_ids = cached.new_block_ids[row] or ()
            message.new_block_rows.extend([row] * len(block_ids))
            message.new_block_ids.extend(block_ids)
        if output.phase is Phase.DECODE and cached.req_ids == self._last_decode:
            message.same_as_last_decode = True
            return
        handles = self._handles
        message.handles.extend([handles[req_id] for req_id in cached.req_ids])
        message.num_computed_tokens.extend(cached.num_computed_tokens)
        if output.phase is Phase.DECODE:
            self._last_decode = list(cached.req_ids)


class StepDecoder:
    """Decodes the steps of one `Execute` stream, in the order in which they arrive.

    The executor names a request `<request_id>#<handle>`, unique in the stream and readable in a log.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._next_handle = 0
        self._names: dict[int, str] = {}
        self._last_decode: CachedRequestsData | None = None

    def decode(self, message: executor_pb2.SchedulerOutput) -> SchedulerOutput:
        """The step.

        Raises:
            FailedPreconditionError: the step is not the next one (STEP_OUT_OF_ORDER).
            InvalidArgumentError: handles, rows or lengths that fit neither the stream nor each other.
        """
        if message.step != self._num_steps:
            raise FailedPreconditionError(
                f"step is {message.step}; allowed: {self._num_steps}, the next one",
                reason=ErrorReason.STEP_OUT_OF_ORDER,
            )
        self._num_steps += 1
        finished = [self._forget(handle) for handle in message.finished_handles]
        new = [self._decode_new(request) for request in message.new_requests]
        phase = decode_phase(message.phase)
        cached = CachedRequestsData()
        if message.HasField("cached_requests"):
            cached = self._decode_cached(message.cached_requests, phase)
        output = SchedulerOutput(
            step=message.step,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            finished_req_ids=finished,
            phase=phase,
        )
        rows = [*cached.req_ids, *(request.req_id for request in new)]
        self._add_counts(output, rows, message)
        return output

    def _forget(self, handle: int) -> str:
        name = self._names.pop(handle, None)
        if name is None:
            raise InvalidArgumentError.of("finished_handles", handle, "a handle that was told and has not finished")
        return name

    def _decode_new(self, message: executor_pb2.NewRequestData) -> NewRequestData:
        if message.handle != self._next_handle:
            raise InvalidArgumentError.of("new_requests.handle", message.handle, f"{self._next_handle}, the next one")
        self._next_handle += 1
        spec = decode_spec(message.spec)
        name = self._names[message.handle] = f"{spec.request_id}#{message.handle}"
        return NewRequestData(name, spec, message.slot, list(message.block_ids), message.num_computed_tokens)

    def _decode_cached(self, message: executor_pb2.CachedRequestsData, phase: Phase | None) -> CachedRequestsData:
        if message.same_as_last_decode:
            cached = self._advance_last_decode(message)
        else:
            cached = self._decode_rows(message)
        _add_blocks(cached, message)
        if phase is Phase.DECODE:
            self._last_decode = cached
        return cached

    def _advance_last_decode(self, message: executor_pb2.CachedRequestsData) -> CachedRequestsData:
        last = self._last_decode
        if last is None:
            raise InvalidArgumentError.of("cached_requests.same_as_last_decode", True, "false before the first decode")
        if message.handles or message.num_computed_tokens:
            raise InvalidArgumentError.of("cached_requests.same_as_last_decode", True, "false beside handles or counts")
        counts = [count + 1 for count in last.num_computed_tokens]
        return CachedRequestsData(last.req_ids, counts, [None] * len(counts))

    def _decode_rows(self, message: executor_pb2.CachedRequestsData) -> CachedRequestsData:
        names = self._names
        try:
            req_ids = [names[handle] for handle in message.handles]
        except KeyError as error:
            raise InvalidArgumentError.of(
                "cached_requests.handles", error.args[0], "handles that were told and have not finished"
            ) from None
        counts = list(message.num_computed_tokens)
        if len(counts) != len(req_ids):
            raise InvalidArgumentError.of("cached_requests.num_computed_tokens", len(counts), f"{len(req_ids)} entries")
        return CachedRequestsData(req_ids, counts, [None] * len(req_ids))

    def _add_counts(self, output: SchedulerOutput, rows: list[str], message: executor_pb2.SchedulerOutput) -> None:
        num_counts = 0 if output.phase is Phase.DECODE else len(rows)
        for field in ("num_scheduled_tokens", "num_scheduled_tokens_padded"):
            found = len(getattr(message, field))
            if found != num_counts:
                raise InvalidArgumentError.of(field, found, f"{num_counts} entries")
        if output.phase is Phase.DECODE:
            output.num_scheduled_tokens = dict.fromkeys(rows, 1)
            output.num_scheduled_tokens_padded = output.num_scheduled_tokens
        else:
            output.num_scheduled_tokens = dict(zip(rows, message.num_scheduled_tokens, strict=True))
            output.num_scheduled_tokens_padded = dict(zip(rows, message.num_scheduled_tokens_padded, strict=True))
        if len(output.num_scheduled_tokens) != len(rows):
            raise InvalidArgumentError.of("cached_requests.handles", len(rows), "each request once")


def _add_blocks(cached: CachedRequestsData, message: executor_pb2.CachedRequestsData) -> None:
    if len(message.new_block_rows) != len(message.new_block_ids):
        raise InvalidArgumentError.of(
            "cached_requests.new_block_ids", len(message.new_block_ids), f"{len(message.new_block_rows)} entries"
        )
    for row, block_id in zip(message.new_block_rows, message.new_block_ids, strict=True):
        if row >= len(cached.req_ids):
            raise InvalidArgumentError.of("cached_requests.new_block_rows", row, f"[0, {len(cached.req_ids)})")
        blocks = cached.new_block_ids[row]
        if blocks is None:
            cached.new_block_ids[row] = [block_id]
        else:
            blocks.append(block_id)


def encode_runner_output(output: ModelRunnerOutput) -> executor_pb2.ModelRunnerOutput:
    message = executor_pb2.ModelRunnerOutput(
        step=output.step, sampled_token_ids=output.sampled_token_ids, failed_rows=output.failed_rows
    )
    for row, logprobs in enumerate(output.logprobs):
        if logprobs is not None:
            message.logprobs.add(row=row, logprobs=encode_logprobs(logprobs))
    timings = output.timings
    message.timings.queue_us = timings.queue_us
    message.timings.device_us = timings.device_us
    message.timings.host_us = timings.host_us
    return message


def decode_runner_output(message: executor_pb2.ModelRunnerOutput) -> ModelRunnerOutput:
    """Raises InvalidArgumentError for log-probabilities of a row that is not there, or that has some already."""
    tokens = list(message.sampled_token_ids)
    logprobs: list[TokenLogprobs | None] = [None] * len(tokens) if message.logprobs else []
    for entry in message.logprobs:
        if entry.row >= len(tokens):
            raise InvalidArgumentError.of("logprobs.row", entry.row, f"[0, {len(tokens)})")
        if logprobs[entry.row] is not None:
            raise InvalidArgumentError.of("logprobs.row", entry.row, "each row once")
        logprobs[entry.row] = decode_logprobs(entry.logprobs)
    timings = StepTimings(message.timings.queue_us, message.timings.device_us, message.timings.host_us)
    return ModelRunnerOutput(message.step, tokens, logprobs, list(message.failed_rows), timings)


def encode_execution_failed(error: HoldbackError) -> executor_pb2.ExecutionFailed:
    reason = errors_pb2.ErrorReason.Value(f"ERROR_REASON_{error.reason.value}")
    return executor_pb2.ExecutionFailed(reason=reason, message=error.message)


def decode_execution_failed(message: executor_pb2.ExecutionFailed) -> HoldbackError:
    """UnavailableError where the executor lost its lease, InternalError where a step failed."""
    known = message.reason in errors_pb2.ErrorReason.values()
    name = errors_pb2.ErrorReason.Name(message.reason).removeprefix("ERROR_REASON_") if known else ""
    reason = ErrorReason(name) if name in ErrorReason.__members__ else ErrorReason.INTERNAL
    kind = UnavailableError if reason is ErrorReason.LEASE_MISMATCH else InternalError
    return kind(message.message, reason=reason)


def encode_model_info(model: ModelInfo) -> types_pb2.ModelInfo:
    return types_pb2.ModelInfo(
        fingerprint=model.fingerprint,
        name=model.name,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_model_len=model.max_model_len,
    )


def decode_model_info(message: types_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        message.fingerprint, message.name, message.vocab_size, tuple(message.eos_token_ids), message.max_model_len
    )


def encode_executor_info(info: ExecutorInfo) -> scheduler_pb2.ExecutorInfo:
    limits = info.limits
    major, minor = info.protocol_version
    return scheduler_pb2.ExecutorInfo(
        protocol_version=types_pb2.ProtocolVersion(major=major, minor=minor),
        executor_id=info.executor_id,
        lease=info.lease,
        port=info.port,
        advertise_address=info.advertise_address,
        model=encode_model_info(info.model),
        limits=scheduler_pb2.ExecutorLimits(
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_batched_tokens_buckets=limits.num_batched_tokens_buckets,
            num_seqs_buckets=limits.num_seqs_buckets,
            decode_context_length_buckets=limits.decode_context_length_buckets,
            max_steps_in_flight=limits.max_steps_in_flight,
        ),
        latencies=[
            scheduler_pb2.GraphLatency(
                phase=encode_phase(entry.phase), size=entry.size, context=entry.context, latency_us=entry.latency_us
            )
            for entry in info.latencies
        ],
        device=info.device,
        compiled=_encode_compile_counts(info.compiled),
        kernels=info.kernels,
    )


def _encode_compile_counts(counts: CompileCounts | None) -> scheduler_pb2.CompileCounts | None:
    if counts is None:
        return None
    return scheduler_pb2.CompileCounts(
        num_hits=counts.num_hits, num_misses=counts.num_misses, build_ms=round(counts.build_s * 1000)
    )


def decode_executor_info(message: scheduler_pb2.ExecutorInfo) -> ExecutorInfo:
    """Raises InvalidArgumentError for a latency without a phase. Everything else is the registry's to check."""
    limits = message.limits
    return ExecutorInfo(
        executor_id=message.executor_id,
        lease=message.lease,
        port=message.port,
        model=decode_model_info(message.model),
        limits=ExecutorLimits(
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_batched_tokens_buckets=tuple(limits.num_batched_tokens_buckets),
            num_seqs_buckets=tuple(limits.num_seqs_buckets),
            decode_context_length_buckets=tuple(limits.decode_context_length_buckets),
            max_steps_in_flight=limits.max_steps_in_flight,
        ),
        latencies=tuple(_decode_latencies(message.latencies)),
        advertise_address=message.advertise_address,
        device=message.device,
        compiled=_decode_compile_counts(message.compiled) if message.HasField("compiled") else None,
        kernels=message.kernels,
        protocol_version=(message.protocol_version.major, message.protocol_version.minor),
    )


def _decode_compile_counts(message: scheduler_pb2.CompileCounts) -> CompileCounts:
    return CompileCounts(message.num_hits, message.num_misses, message.build_ms / 1000)


def _decode_latencies(messages: Iterable[scheduler_pb2.GraphLatency]) -> Iterable[GraphLatency]:
    for message in messages:
        phase = decode_phase(message.phase)
        if phase is None:
            raise InvalidArgumentError.of("latencies.phase", "PHASE_UNSPECIFIED", "PHASE_PREFILL or PHASE_DECODE")
        yield GraphLatency(phase, message.size, message.context, message.latency_us)


def encode_timings(timings: StepTimings) -> executor_pb2.StepTimings:
    return executor_pb2.StepTimings(queue_us=timings.queue_us, device_us=timings.device_us, host_us=timings.host_us)
