"""What a request may ask for, whoever takes it: one table and one check, for gateways and for the scheduler.

All of it is asked of the message, before anything is decoded or copied. Executors refuse by bounds of their own, which
are wider: what no device could compute, whoever sent it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdback.errors import ErrorReason, InvalidArgumentError
from holdback.v1 import types_pb2

MAX_REQUEST_ID_BYTES = 256
MAX_CACHE_SALT_BYTES = 256
MAX_TRACE_BYTES = 512
"""Of `traceparent` and of `tracestate`, each."""

MAX_TOKEN_ID_LIST = 1024
MAX_NUM_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Range:
    """A closed interval, or one that leaves out its lower end."""

    low: float
    high: float
    excludes_low: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.excludes_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{'(' if self.excludes_low else '['}{self.low:g}, {self.high:g}]"


RANGES = {
    "temperature": Range(0, 1000),
    "top_p": Range(0, 1),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 10, excludes_low=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "num_logprobs": Range(0, MAX_NUM_LOGPROBS),
}
BIAS_RANGE = Range(-100, 100)


def check_sampling(message: types_pb2.SamplingParams) -> None:
    """Values and lengths of lists; what is unset is right. Token ids are for those who know the vocabulary.

    Raises:
        InvalidArgumentError: with the field, the value and the limit.
    """
    for name, allowed in RANGES.items():
        if message.HasField(name):  # type: ignore[arg-type]
            check_range(f"sampling.{name}", getattr(message, name), allowed)
    if message.HasField("top_k") and message.top_k < -1:
        raise InvalidArgumentError.of("sampling.top_k", message.top_k, "at least 1; 0 or -1 for all")
    _check_lengths(message)
    check_num_entries("sampling.stop_token_ids", len(message.stop_token_ids))
    if message.HasField("allowed_token_ids"):
        check_num_entries("sampling.allowed_token_ids", len(message.allowed_token_ids.token_ids), least=1)
    check_num_entries("sampling.logit_bias", len(message.logit_bias))
    for index, entry in enumerate(message.logit_bias):
        if not BIAS_RANGE.low <= entry.bias <= BIAS_RANGE.high:  # cheaper than to name each of a thousand
            check_range(f"sampling.logit_bias[{index}].bias", entry.bias, BIAS_RANGE)


def _check_lengths(message: types_pb2.SamplingParams) -> None:
    if not message.HasField("max_tokens"):
        return
    if message.max_tokens < 1:
        raise InvalidArgumentError.of("sampling.max_tokens", message.max_tokens, "at least 1")
    check_min_tokens(message.min_tokens, message.max_tokens)


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises InvalidArgumentError: more tokens are wanted than may come."""
    if min_tokens > max_tokens:
        raise InvalidArgumentError.of("sampling.min_tokens", min_tokens, f"at most max_tokens, which is {max_tokens}")


def check_range(field: str, value: float, allowed: Range) -> None:
    """A finite number within the range. Raises InvalidArgumentError."""
    if not math.isfinite(value) or value not in allowed:
        # seven digits: a float of the wire as the caller wrote it
        shown = float(f"{value:.7g}") if isinstance(value, float) else value
        raise InvalidArgumentError.of(field, shown, str(allowed))


def check_num_entries(field: str, num_entries: int, *, least: int = 0, most: int = MAX_TOKEN_ID_LIST) -> None:
    """Not more entries than a list may have, nor fewer. Raises InvalidArgumentError."""
    if not least <= num_entries <= most:
        raise size_error(field, num_entries, "entries", f"[{least}, {most}]")


def check_bytes(field: str, text: str, limit: int) -> None:
    """Text of at most `limit` bytes of UTF-8. Raises InvalidArgumentError."""
    size = num_bytes(text)
    if size > limit:
        raise size_error(field, size, "bytes", f"at most {limit}")


def num_bytes(text: str) -> int:
    """Of UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def size_error(
    field: str, size: int, unit: str, limit: str, reason: ErrorReason = ErrorReason.INVALID_FIELD
) -> InvalidArgumentError:
    """The error of a field that has too much or too little of something."""
    message = f"{field} has {size} {unit}; allowed: {limit}"
    return InvalidArgumentError(message, field=field, value=f"{size} {unit}", limit=limit, reason=reason)
