"""Requests, what comes of them, and enums, to messages and back. `codec` gives all of it out again."""

from __future__ import annotations

from collections.abc import Sequence

from holdback.errors import InvalidArgumentError
from holdback.types import (
    FinishReason,
    Phase,
    RequestSpec,
    SamplingParams,
    SchedulerState,
    TokenLogprobs,
    TraceContext,
    Usage,
)
from holdback.v1 import types_pb2

_PHASES: dict[Phase | None, types_pb2.Phase.ValueType] = {
    None: types_pb2.PHASE_UNSPECIFIED,
    Phase.PREFILL: types_pb2.PHASE_PREFILL,
    Phase.DECODE: types_pb2.PHASE_DECODE,
}
_FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
}
_STATES = {
    SchedulerState.IDLE: types_pb2.SCHEDULER_STATE_IDLE,
    SchedulerState.ACTIVE_PREFILL: types_pb2.SCHEDULER_STATE_ACTIVE_PREFILL,
    SchedulerState.ACTIVE_DECODE: types_pb2.SCHEDULER_STATE_ACTIVE_DECODE,
}
_PHASES_BACK = {number: phase for phase, number in _PHASES.items()}
_FINISH_REASONS_BACK = {number: reason for reason, number in _FINISH_REASONS.items()}
_STATES_BACK = {number: state for state, number in _STATES.items()}


def encode_spec(spec: RequestSpec) -> types_pb2.RequestSpec:
    message = encode_shared(spec)
    _fill_own(message, spec)
    return message


def encode_shared(spec: RequestSpec) -> types_pb2.RequestSpec:
    """What a request has in common with the other choices of its prompt: all but id, seed, state and times."""
    message = types_pb2.RequestSpec(
        prompt_token_ids=spec.prompt_token_ids,
        sampling=encode_sampling(spec.sampling),
        priority=spec.priority,
        cache_salt=spec.cache_salt,
    )
    if spec.trace.traceparent:
        message.trace_context.traceparent = spec.trace.traceparent
        message.trace_context.tracestate = spec.trace.tracestate
    return message


def fill_spec(message: types_pb2.RequestSpec, spec: RequestSpec, shared: types_pb2.RequestSpec) -> None:
    """Puts into `message` what `encode_spec` gives, the faster for `shared`, which is of another choice."""
    message.CopyFrom(shared)
    _fill_own(message, spec)


def _fill_own(message: types_pb2.RequestSpec, spec: RequestSpec) -> None:
    message.request_id = spec.request_id
    message.generation = spec.generation
    message.output_token_ids.extend(spec.output_token_ids)
    message.sampling.seed = spec.sampling.seed
    if spec.deadline_ms is not None:
        message.deadline_ms = spec.deadline_ms
    message.queued_ms = spec.queued_ms


def decode_spec(message: types_pb2.RequestSpec) -> RequestSpec:
    return RequestSpec(
        request_id=message.request_id,
        # Tuples, for the garbage collector looks through the lists of all that wait, again and again.
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=decode_sampling(message.sampling),
        generation=message.generation,
        output_token_ids=tuple(message.output_token_ids),
        priority=message.priority,
        cache_salt=message.cache_salt,
        deadline_ms=message.deadline_ms if message.HasField("deadline_ms") else None,
        queued_ms=message.queued_ms,
        trace=TraceContext(message.trace_context.traceparent, message.trace_context.tracestate),
    )


_SCALARS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
)


def encode_sampling(params: SamplingParams) -> types_pb2.SamplingParams:
    message = types_pb2.SamplingParams(
        top_k=params.top_k, stop_token_ids=params.stop_token_ids, num_logprobs=params.num_logprobs
    )
    for name in _SCALARS:
        setattr(message, name, getattr(params, name))
    if params.allowed_token_ids is not None:
        message.allowed_token_ids.SetInParent()
        message.allowed_token_ids.token_ids.extend(params.allowed_token_ids)
    for token_id, bias in params.logit_bias.items():
        message.logit_bias.add(token_id=token_id, bias=bias)
    return message


def decode_sampling(message: types_pb2.SamplingParams) -> SamplingParams:
    """Unset fields have the defaults of `SamplingParams`; a `top_k` of 0 or -1 is None. Values are not checked.

    Raises:
        InvalidArgumentError: two biases of one token, of which only one could be kept.
    """
    values = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}  # type: ignore[arg-type]
    return SamplingParams(
        **values,
        top_k=message.top_k if message.HasField("top_k") and message.top_k not in (0, -1) else None,
        stop_token_ids=tuple(message.stop_token_ids),
        allowed_token_ids=(
            tuple(message.allowed_token_ids.token_ids) if message.HasField("allowed_token_ids") else None
        ),
        logit_bias=_decode_logit_bias(message.logit_bias),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
    )


def _decode_logit_bias(entries: Sequence[types_pb2.LogitBias]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for index, entry in enumerate(entries):
        if entry.token_id in biases:
            field = f"sampling.logit_bias[{index}].token_id"
            raise InvalidArgumentError.of(field, entry.token_id, "at most one entry per token")
        biases[entry.token_id] = entry.bias
    return biases


def encode_logprobs(logprobs: TokenLogprobs) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )


def decode_logprobs(message: types_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.token_id, message.logprob, tuple(message.top_token_ids), tuple(message.top_logprobs))


def encode_usage(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def decode_usage(message: types_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def encode_finish_reason(reason: FinishReason) -> types_pb2.FinishReason.ValueType:
    return _FINISH_REASONS[reason]


def decode_finish_reason(number: types_pb2.FinishReason.ValueType) -> FinishReason:
    """Raises InvalidArgumentError for UNSPECIFIED and for values of a newer peer."""
    try:
        return _FINISH_REASONS_BACK[number]
    except KeyError:
        raise InvalidArgumentError.of("finish_reason", number, "a known reason") from None


def encode_state(state: SchedulerState) -> types_pb2.SchedulerState.ValueType:
    return _STATES[state]


def decode_state(number: types_pb2.SchedulerState.ValueType) -> SchedulerState:
    """Raises InvalidArgumentError for UNSPECIFIED and for values of a newer peer."""
    try:
        return _STATES_BACK[number]
    except KeyError:
        raise InvalidArgumentError.of("state", number, "a known state") from None


def encode_phase(phase: Phase | None) -> types_pb2.Phase.ValueType:
    return _PHASES[phase]


def decode_phase(number: types_pb2.Phase.ValueType) -> Phase | None:
    """None for UNSPECIFIED. Raises InvalidArgumentError for values of a newer peer."""
    try:
        return _PHASES_BACK[number]
    except KeyError:
        raise InvalidArgumentError.of("phase", number, "a known phase") from None
