"""Requests of the engine protocol to `inference_pb2.Generation`, and errors back to the names of its fields.

The protocol has no presence for most numbers: 0 stands for unset where vLLM's own server takes it so, which is
everywhere but in `temperature`. What only changes how text looks (`spaces_between_special_tokens`,
`include_stop_str_in_output`, `original_text`) changes nothing here, for no text is sent.
"""

from __future__ import annotations

import re

from smg_grpc_proto import vllm_engine_pb2

from gateway.limits import unset_error
from holdback.errors import InvalidArgumentError
from holdback.request_limits import RANGES, check_num_entries
from holdback.v1 import inference_pb2, types_pb2

MAX_TOP_K = 2**31 - 1
"""More than any vocabulary has; a larger value keeps all tokens just the same."""

_UNSUPPORTED = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "media_refs",
)
_UNSUPPORTED_SAMPLING = ("prompt_logprobs", "truncate_prompt_tokens")
_SAME_WHERE_NOT_ZERO = (
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
)
_SAME_WHERE_SET = ("temperature", "max_tokens", "seed")

# Fields of `Generation` that this protocol calls otherwise.
_NAMES = {
    "token_ids": "tokenized.input_ids",
    "sampling.num_logprobs": "sampling_params.logprobs",
    "stop": "sampling_params.stop",
    "n": "sampling_params.n",
}


def decode_request(request: vllm_engine_pb2.GenerateRequest, model: str) -> inference_pb2.Generation:
    """What a request asks for.

    Args:
        request: as it came.
        model: that this service serves.

    Raises:
        InvalidArgumentError: the request uses what is not supported, or a number that has no counterpart here. All
            other limits are left to `limits.check_generation`.
    """
    _refuse_unsupported(request)
    kind = request.WhichOneof("input")
    if kind is None:
        raise unset_error("input", "text or tokenized")
    params = request.sampling_params
    message = inference_pb2.Generation(
        request_id=request.request_id,
        model=model,
        sampling=_decode_sampling(params),
        n=params.n or None,
        stop=params.stop,
        keep_special_tokens=not params.skip_special_tokens,
    )
    if kind == "text":
        message.text = request.text
    else:
        message.token_ids.SetInParent()
        message.token_ids.token_ids.extend(request.tokenized.input_ids)
    return message


def name_as_sent(error: InvalidArgumentError) -> InvalidArgumentError:
    """The same error with the field as this protocol names it."""
    path = re.match(r"[^\[]*", error.field)
    name = path[0] if path else ""
    sent = _NAMES.get(name) or re.sub(r"^sampling\.", "sampling_params.", name)
    if sent == name:
        return error
    return InvalidArgumentError(
        error.message.replace(name, sent, 1) if error.message.startswith(name) else error.message,
        field=error.field.replace(name, sent, 1),
        value=error.value,
        limit=error.limit,
        reason=error.reason,
    )


def _refuse_unsupported(request: vllm_engine_pb2.GenerateRequest) -> None:
    params = request.sampling_params
    used = [name for name in _UNSUPPORTED if request.HasField(name)]
    used += ["extra_mm_inputs"] if request.extra_mm_inputs else []
    used += [f"sampling_params.{name}" for name in _UNSUPPORTED_SAMPLING if params.HasField(name)]
    constraint = params.WhichOneof("constraint")
    used += [f"sampling_params.{constraint}"] if constraint is not None else []
    if used:
        raise InvalidArgumentError(
            f"{used[0]} is set, which is not supported; allowed: unset", field=used[0], value="set", limit="unset"
        )
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise InvalidArgumentError.of("data_parallel_rank", request.data_parallel_rank, "0 or unset: there is one rank")


def _decode_sampling(params: vllm_engine_pb2.SamplingParams) -> types_pb2.SamplingParams:
    message = types_pb2.SamplingParams(stop_token_ids=params.stop_token_ids)
    for name in _SAME_WHERE_NOT_ZERO:
        value = getattr(params, name)
        if value:
            setattr(message, name, value)
    for name in _SAME_WHERE_SET:
        if params.HasField(name):
            setattr(message, name, getattr(params, name))
    if params.top_k:
        message.top_k = min(params.top_k, MAX_TOP_K)
    if params.HasField("logprobs"):
        if params.logprobs < 0:
            raise InvalidArgumentError.of(
                "sampling_params.logprobs", params.logprobs, f"{RANGES['num_logprobs']}; -1 for all is not supported"
            )
        message.num_logprobs = params.logprobs
    check_num_entries("sampling_params.logit_bias", len(params.logit_bias))
    for token_id, bias in params.logit_bias.items():
        if token_id < 0:
            raise InvalidArgumentError.of("sampling_params.logit_bias", token_id, "token ids of at least 0")
        message.logit_bias.add(token_id=token_id, bias=bias)
    return message
