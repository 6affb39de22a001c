"""What a request's sampling parameters ask for, checked against the vocabulary: for every sampler."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor_svc.sampling_limits import check_vocabulary
from holdback.types import SamplingParams


class RequestRules:
    """What one request's parameters do to its logits before a token is chosen, as tensors made once.

    Attributes:
        params: of the request.
        allowed: int64, the only tokens that may be chosen; None allows all.
        biased: int64, tokens whose logit gets `biases` added.
        biases: float32, parallel to `biased`.
        ending: int64, tokens that `min_tokens` bans; none where that would leave nothing to sample.
        counts_outputs: whether a penalty asks how often each token was drawn.
        counts_prompt: whether a penalty asks for the tokens of the prompt.

    Raises:
        InvalidArgumentError: a token id outside the vocabulary.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.params = params
        self.allowed = None
        if params.allowed_token_ids is not None:
            self.allowed = check_token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
        self.biased = check_token_ids("logit_bias", list(params.logit_bias), vocab_size)
        self.biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        ending = {*eos_token_ids, *params.stop_token_ids}
        check_vocabulary("stop_token_ids", ending, vocab_size)
        is_all = len(ending) == vocab_size
        if is_all or (params.allowed_token_ids is not None and ending.issuperset(params.allowed_token_ids)):
            ending = set()
        self.ending = torch.tensor(sorted(ending), dtype=torch.long)
        self.counts_outputs = params.presence_penalty != 0 or params.frequency_penalty != 0
        self.counts_prompt = params.repetition_penalty != 1

    @property
    def has_counts(self) -> bool:
        return self.counts_outputs or self.counts_prompt

    def changes(self, num_outputs: int) -> bool:
        """Whether output `num_outputs` is chosen from other logits than the model's."""
        bans = num_outputs < self.params.min_tokens and len(self.ending) > 0
        return bans or self.allowed is not None or len(self.biased) > 0 or self.has_counts

    def decides(self, num_outputs: int) -> bool:
        """Whether output `num_outputs` may be another token than the largest of the model's logits."""
        return self.params.temperature > 0 or self.changes(num_outputs)


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
    """As int64. Raises InvalidArgumentError, with the field's name, for one outside the vocabulary."""
    check_vocabulary(name, token_ids, vocab_size)
    return torch.tensor(list(token_ids), dtype=torch.long)
