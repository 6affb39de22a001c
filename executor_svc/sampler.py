"""Sampling on the device: from a step's logits to its tokens.

What a request asks for is applied in this order: allowed tokens, biases, the ban of ending tokens before `min_tokens`,
penalties; then temperature 0 takes the largest logit, the lowest id among equals, and any other draws (`draw`) with the
random number that came with the row. Rows never influence each other.

The counts that penalties need live here by slot and grow with every sampled token, so that a step can be launched
before anybody has seen the tokens of the step before it. Both tables are made when a request first needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from executor_svc.draw import draw
from holdback.errors import InvalidArgumentError
from holdback.types import RequestSpec, SamplingParams, TokenLogprobs

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Sampled:
    """The tokens of one step.

    Attributes:
        token_ids: int64 [rows]; 0 in a failed row.
        failed_rows: rows whose logits were not finite, ascending.
        logprobs: parallel to the rows, None where not asked for; empty when no row asked.
    """

    token_ids: torch.Tensor
    failed_rows: list[int]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)


class _Rules:
    """What one request's parameters do to its logits before a token is chosen, as tensors made once."""

    def __init__(self, params: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.params = params
        self.allowed = None
        if params.allowed_token_ids is not None:
            self.allowed = _token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
        self.biased = _token_ids("logit_bias", list(params.logit_bias), vocab_size)
        self.biases = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        ending = {*eos_token_ids, *params.stop_token_ids}
        if params.allowed_token_ids is not None and ending.issuperset(params.allowed_token_ids):
            ending = set()  # a ban of everything allowed would leave nothing to sample
        self.ending = _token_ids("stop_token_ids", sorted(ending), vocab_size)
        self.counts_outputs = params.presence_penalty != 0 or params.frequency_penalty != 0
        self.counts_prompt = params.repetition_penalty != 1

    @property
    def has_counts(self) -> bool:
        return self.counts_outputs or self.counts_prompt

    def changes(self, num_outputs: int) -> bool:
        """Whether output `num_outputs` is chosen from other logits than the model's."""
        bans = num_outputs < self.params.min_tokens and len(self.ending) > 0
        return bans or self.allowed is not None or len(self.biased) > 0 or self.has_counts


def _token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> torch.Tensor:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidArgumentError.of(name, token_id, f"[0, {vocab_size}), the vocabulary of the model")
    return torch.tensor(list(token_ids), dtype=torch.long)


class Sampler:
    """Samples for one model. Everything runs in the order of the calls."""

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._num_rows = max_num_seqs + 1  # the last one is for rows without a request
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._rules: dict[int, _Rules] = {}
        self._num_drawn: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None

    def reset(self) -> None:
        """Forgets every request."""
        self._rules.clear()
        self._num_drawn = None
        self._in_prompt = None

    def start_request(self, slot: int, spec: RequestSpec) -> None:
        """Counts for `slot` start from the request's prompt and from the outputs it already has.

        Raises:
            InvalidArgumentError: a token id outside the vocabulary.
        """
        rules = self._make_rules(spec.sampling)
        if rules.has_counts:
            prompt = _token_ids("prompt_token_ids", spec.prompt_token_ids, self._vocab_size)
            outputs = _token_ids("output_token_ids", spec.output_token_ids, self._vocab_size)
            num_drawn, in_prompt = self._counts()
            num_drawn[slot] = torch.bincount(outputs, minlength=self._vocab_size)
            in_prompt[slot] = False
            in_prompt[slot, prompt] = True
        self._rules[slot] = rules

    def sample(
        self,
        logits: torch.Tensor,
        params: Sequence[SamplingParams | None],
        num_outputs: Sequence[int],
        uniform: torch.Tensor,
        slots: Sequence[int],
    ) -> Sampled:
        """Chooses one token for each row and counts it for the row's slot.

        Args:
            logits: float32 [rows, vocab_size], as the model gave them; not changed.
            params: of each row; None is greedy.
            num_outputs: of each row before this token.
            uniform: float32 [rows] in [0, 1), the random number of each row.
            slots: of each row.
        """
        smallest, largest = torch.aminmax(logits, dim=-1)
        is_finite = torch.isfinite(smallest) & torch.isfinite(largest)
        failed_rows = (~is_finite).nonzero().flatten().tolist()
        given = logits
        if failed_rows:
            logits = torch.where(is_finite[:, None], logits, 0.0)
        rules = [self._rules_of(slot, row or _GREEDY) for slot, row in zip(slots, params, strict=True)]
        token_ids = self._choose(self._adjust(logits, rules, num_outputs, slots), rules, uniform)
        token_ids[failed_rows] = 0
        self._count(token_ids, rules, slots)
        logprobs = self._logprobs(given, token_ids, rules, set(failed_rows))
        return Sampled(token_ids, failed_rows, logprobs)

    def _make_rules(self, params: SamplingParams) -> _Rules:
        return _Rules(params, self._vocab_size, self._eos_token_ids)

    def _rules_of(self, slot: int, params: SamplingParams) -> _Rules:
        """Those that `start_request` made, unless the row is not the slot's request, as in a warm-up."""
        rules = self._rules.get(slot)
        return rules if rules is not None and rules.params is params else self._make_rules(params)

    def _counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 and bool [max_num_seqs + 1, vocab_size]: how often a slot drew a token, and if its prompt has it."""
        shape = (self._num_rows, self._vocab_size)
        if self._num_drawn is None:
            self._num_drawn = torch.zeros(shape, dtype=torch.int32)
        if self._in_prompt is None:
            self._in_prompt = torch.zeros(shape, dtype=torch.bool)
        return self._num_drawn, self._in_prompt

    def _adjust(
        self, logits: torch.Tensor, rules: Sequence[_Rules], num_outputs: Sequence[int], slots: Sequence[int]
    ) -> torch.Tensor:
        changed = [row for row, rule in enumerate(rules) if rule.changes(num_outputs[row])]
        if not changed:
            return logits
        logits = logits.clone()
        for row in changed:
            logits[row] = self._adjusted(logits[row], rules[row], num_outputs[row], slots[row])
        return logits

    def _adjusted(self, row: torch.Tensor, rules: _Rules, num_outputs: int, slot: int) -> torch.Tensor:
        if rules.allowed is not None:
            row = torch.full_like(row, float("-inf")).index_copy_(0, rules.allowed, row[rules.allowed])
        row = row.index_add(0, rules.biased, rules.biases)
        if num_outputs < rules.params.min_tokens:
            row = row.index_fill(0, rules.ending, float("-inf"))
        return self._penalized(row, rules, slot) if rules.has_counts else row

    def _penalized(self, row: torch.Tensor, rules: _Rules, slot: int) -> torch.Tensor:
        num_drawn, in_prompt = (table[slot] for table in self._counts())
        params = rules.params
        if rules.counts_prompt:
            is_seen = in_prompt | (num_drawn > 0)
            penalized = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
            row = torch.where(is_seen, penalized, row)
        return row - params.frequency_penalty * num_drawn - params.presence_penalty * (num_drawn > 0)

    def _choose(self, logits: torch.Tensor, rules: Sequence[_Rules], uniform: torch.Tensor) -> torch.Tensor:
        token_ids = logits.argmax(dim=-1)  # the first of equal ones
        drawn = [row for row, rule in enumerate(rules) if rule.params.temperature > 0]
        if drawn:
            token_ids[drawn] = draw(logits[drawn], [rules[row].params for row in drawn], uniform[drawn])
        return token_ids

    def _count(self, token_ids: torch.Tensor, rules: Sequence[_Rules], slots: Sequence[int]) -> None:
        for row, rule in enumerate(rules):
            if rule.has_counts:
                self._counts()[0][slots[row], token_ids[row]] += 1

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, rules: Sequence[_Rules], failed: set[int]
    ) -> list[TokenLogprobs | None]:
        """Of the model's own logits, whatever was done to them for sampling."""
        if all(rule.params.num_logprobs is None for rule in rules):
            return []
        return [
            None
            if rule.params.num_logprobs is None or row in failed
            else _row_logprobs(logits[row], int(token_ids[row]), rule.params.num_logprobs)
            for row, rule in enumerate(rules)
        ]


def _row_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = logprobs.topk(min(num_top, len(logprobs)))
    top = sorted(zip(values.tolist(), ids.tolist(), strict=True), key=lambda pair: (-pair[0], pair[1]))
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logprobs[token_id]),
        top_token_ids=tuple(token for _, token in top),
        top_logprobs=tuple(value for value, _ in top),
    )
