"""What sampling parameters can be, whoever sent them: asked once for each request, on every device."""

from __future__ import annotations

import math
from collections.abc import Iterable

from holdback.errors import InvalidArgumentError
from holdback.types import SamplingParams

MAX_NUM_LOGPROBS = 1024
MAX_BIAS = 1e6
"""Far more than any logit, and small enough not to make one infinite."""

_INFINITY = math.inf
# Lowest and highest number of each field, and how to say it. No number is infinite, and NaN is in no range.
_RANGES = (
    ("temperature", 0.0, _INFINITY, "at least 0"),
    ("top_k", 1, _INFINITY, "at least 1"),
    ("top_p", 0.0, 1.0, "[0, 1]"),
    ("min_p", 0.0, 1.0, "[0, 1]"),
    ("repetition_penalty", math.ulp(0.0), _INFINITY, "above 0"),
    ("presence_penalty", -2.0, 2.0, "[-2, 2]"),
    ("frequency_penalty", -2.0, 2.0, "[-2, 2]"),
    ("max_tokens", 1, _INFINITY, "at least 1"),
    ("min_tokens", 0, _INFINITY, "at least 0"),
    ("num_logprobs", 0, MAX_NUM_LOGPROBS, f"[0, {MAX_NUM_LOGPROBS}]"),
)


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidArgumentError for a number that cannot be, or a token id outside the vocabulary."""
    for name, low, high, allowed in _RANGES:
        value = getattr(params, name)
        if value is not None and not (low <= value <= high and value < _INFINITY):
            raise InvalidArgumentError.of(name, value, allowed)
    for bias in params.logit_bias.values():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise InvalidArgumentError.of("logit_bias", bias, f"[-{MAX_BIAS:g}, {MAX_BIAS:g}] for each token")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise InvalidArgumentError.of("allowed_token_ids", "empty", "at least one token, or all")
    check_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
    check_vocabulary("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    check_vocabulary("logit_bias", params.logit_bias, vocab_size)


def check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises InvalidArgumentError, with the field's name, for an id outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidArgumentError.of(name, token_id, f"[0, {vocab_size}), the vocabulary of the model")
