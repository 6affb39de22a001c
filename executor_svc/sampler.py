"""Sampling on the device: from a step's logits to its tokens.

What a request asks for is applied in this order: allowed tokens, biases, the ban of ending tokens before `min_tokens`,
penalties; then temperature 0 takes the largest logit, the lowest id among equals, and any other draws (`draw`) with the
random number that came with the row. Rows never influence each other.

Most rows are greedy and nothing changes their logits: for them one look at each row says which token is the largest and
whether all of it is finite, and nothing is copied.

The counts that penalties need live here by slot and grow with every sampled token, so that a step can be launched
before anybody has seen the tokens of the step before it. Both tables are made when a request first needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from executor_svc.draw import draw as draw_tokens
from executor_svc.sampling_rules import RequestRules, check_token_ids
from holdback.types import RequestSpec, SamplingParams, TokenLogprobs

_GREEDY = SamplingParams(temperature=0.0)

Rank = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Of logits, float32 [rows, vocab_size]: the largest one's id, int64 [rows], the lowest among equals; and whether the
row is finite, bool [rows]. The id of a row that is not means nothing."""

Draw = Callable[[torch.Tensor, Sequence[SamplingParams], torch.Tensor], torch.Tensor]
"""As `draw.draw`."""


def rank_logits(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Rank` with PyTorch."""
    smallest, largest = torch.aminmax(logits, dim=-1)
    return logits.argmax(dim=-1), torch.isfinite(smallest) & torch.isfinite(largest)


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


class Sampler:
    """Samples for one model. Everything runs in the order of the calls."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        rank: Rank = rank_logits,
        draw: Draw = draw_tokens,
    ) -> None:
        self._num_rows = max_num_seqs + 1  # the last one is for rows without a request
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._rank = rank
        self._draw = draw
        self._rules: dict[int, RequestRules] = {}
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
            prompt = check_token_ids("prompt_token_ids", spec.prompt_token_ids, self._vocab_size)
            outputs = check_token_ids("output_token_ids", spec.output_token_ids, self._vocab_size)
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
        token_ids, is_finite = self._rank(logits)
        failed = {row for row, finite in enumerate(is_finite.tolist()) if not finite}
        rules = [self._rules_of(slot, row or _GREEDY) for slot, row in zip(slots, params, strict=True)]
        chosen = [row for row, rule in enumerate(rules) if row not in failed and rule.decides(num_outputs[row])]
        if chosen:
            token_ids[chosen] = self._choose(
                logits[chosen],
                uniform[chosen],
                [rules[row] for row in chosen],
                [num_outputs[row] for row in chosen],
                [slots[row] for row in chosen],
            )
        token_ids[sorted(failed)] = 0
        self._count(token_ids, rules, slots)
        return Sampled(token_ids, sorted(failed), self._logprobs(logits, token_ids, rules, failed))

    def _make_rules(self, params: SamplingParams) -> RequestRules:
        return RequestRules(params, self._vocab_size, self._eos_token_ids)

    def _rules_of(self, slot: int, params: SamplingParams) -> RequestRules:
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

    def _adjusted(self, row: torch.Tensor, rules: RequestRules, num_outputs: int, slot: int) -> torch.Tensor:
        if rules.allowed is not None:
            row = torch.full_like(row, float("-inf")).index_copy_(0, rules.allowed, row[rules.allowed])
        row = row.index_add(0, rules.biased, rules.biases)
        if num_outputs < rules.params.min_tokens:
            row = row.index_fill(0, rules.ending, float("-inf"))
        return self._penalized(row, rules, slot) if rules.has_counts else row

    def _penalized(self, row: torch.Tensor, rules: RequestRules, slot: int) -> torch.Tensor:
        num_drawn, in_prompt = (table[slot] for table in self._counts())
        params = rules.params
        if rules.counts_prompt:
            is_seen = in_prompt | (num_drawn > 0)
            penalized = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
            # A penalty near 0 or a large one makes a logit infinite, which no token could be drawn from.
            most = torch.finfo(torch.float32).max
            row = torch.where(is_seen & (row > float("-inf")), penalized.clamp(-most, most), row)
        return row - params.frequency_penalty * num_drawn - params.presence_penalty * (num_drawn > 0)

    def _choose(
        self,
        logits: torch.Tensor,
        uniform: torch.Tensor,
        rules: Sequence[RequestRules],
        num_outputs: Sequence[int],
        slots: Sequence[int],
    ) -> torch.Tensor:
        """The tokens of rows whose rules decide, int64 [rows]; changes `logits`."""
        for row, rule in enumerate(rules):
            if rule.changes(num_outputs[row]):
                logits[row] = self._adjusted(logits[row], rule, num_outputs[row], slots[row])
        drawn = [row for row, rule in enumerate(rules) if rule.params.temperature > 0]
        token_ids = logits.argmax(dim=-1)  # the first of equal ones; rules exclude with -inf, so `rank` has no say here
        if drawn:
            token_ids[drawn] = self._draw(logits[drawn], [rules[row].params for row in drawn], uniform[drawn])
        return token_ids

    def _count(self, token_ids: torch.Tensor, rules: Sequence[RequestRules], slots: Sequence[int]) -> None:
        for row, rule in enumerate(rules):
            if rule.has_counts:
                self._counts()[0][slots[row], token_ids[row]] += 1

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, rules: Sequence[RequestRules], failed: set[int]
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
