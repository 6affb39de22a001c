"""The rows of `step_sampling.SamplingTables`: what a compiled step must know of each slot's request."""

from __future__ import annotations

import numpy as np
import torch

from executor_svc.sampling_rules import RequestRules, check_token_ids
from executor_svc.step_sampling import SamplingTables
from holdback.errors import InvalidArgumentError
from holdback.types import ModelInfo, RequestSpec


class DeviceTables:
    """Keeps the tables on the device. A row is sent there only where a request asks for what is in it.

    Args:
        max_num_seqs: slots.
        model: for its vocabulary and the tokens that end a request.
        max_logprobs: most likely tokens that a request may ask for.
        device: where the tables are.

    Attributes:
        tensors: the tables.
    """

    def __init__(self, max_num_seqs: int, model: ModelInfo, max_logprobs: int, device: torch.device) -> None:
        self._vocab_size = model.vocab_size
        self._eos_token_ids = model.eos_token_ids
        self._max_logprobs = max_logprobs
        shape = (max_num_seqs + 1, self._vocab_size)
        self.tensors = SamplingTables(
            bias=torch.zeros(shape, dtype=torch.float32, device=device),
            is_ending=torch.zeros(shape, dtype=torch.bool, device=device),
            is_in_prompt=torch.zeros(shape, dtype=torch.bool, device=device),
            num_drawn=torch.zeros(shape, dtype=torch.float32, device=device),
        )
        self._is_biased = np.zeros(max_num_seqs + 1, np.bool_)

    @torch.no_grad()
    def start_request(self, slot: int, spec: RequestSpec) -> None:
        """Fills the slot's rows, which a request before it may have used.

        Raises:
            InvalidArgumentError: a token id outside the vocabulary, or more log-probabilities than a graph returns.
        """
        params = spec.sampling
        if params.num_logprobs is not None and params.num_logprobs > self._max_logprobs:
            raise InvalidArgumentError.of("num_logprobs", params.num_logprobs, f"[0, {self._max_logprobs}]")
        rules = RequestRules(params, self._vocab_size, self._eos_token_ids)
        is_biased = rules.allowed is not None or len(rules.biased) > 0
        if is_biased or self._is_biased[slot]:
            self.tensors.bias[slot].copy_(self._bias(rules))
            self._is_biased[slot] = is_biased
        if params.min_tokens > 0:  # nobody else looks at the row
            self.tensors.is_ending[slot].copy_(self._mask(rules.ending))
        if rules.has_counts:
            prompt = check_token_ids("prompt_token_ids", spec.prompt_token_ids, self._vocab_size)
            outputs = check_token_ids("output_token_ids", spec.output_token_ids, self._vocab_size)
            self.tensors.num_drawn[slot].copy_(torch.bincount(outputs, minlength=self._vocab_size))
            self.tensors.is_in_prompt[slot].copy_(self._mask(prompt))

    @torch.no_grad()
    def reset(self) -> None:
        """Forgets every request."""
        for table in self.tensors:
            table.zero_()
        self._is_biased[:] = False

    def _bias(self, rules: RequestRules) -> torch.Tensor:
        bias = torch.zeros(self._vocab_size)
        if rules.allowed is not None:
            bias.fill_(float("-inf"))
            bias[rules.allowed] = 0.0
        return bias.index_add(0, rules.biased, rules.biases)

    def _mask(self, token_ids: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(self._vocab_size, dtype=torch.bool)
        mask[token_ids] = True
        return mask
