"""Sampling inside a compiled step: the rules of `executor_svc.sampler`, with static shapes and nothing data-dependent.

What one request's parameters do to its logits lies on the device, a row of the vocabulary for each slot
(`SamplingTables`); what changes from step to step comes with the step, a number for each row (`SamplingRows`). Every
row goes through everything, with the numbers that change nothing where a request did not ask, so a batch may mix all of
it and rows never meet.

Neither a sort nor float64 is used: Neuron's compiler fails on sorts, and its hardware has no float64. What top_k,
top_p and min_p keep is the front of the vocabulary in order of logits, the lower id first among equals, so it is enough
to find the last logit that stays: by bisection, whose last step goes to a logit that is there. A token is drawn by
inversion of the distribution function, over sums of blocks of the vocabulary and then within one block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows

MAX_LOGPROBS = 20
"""Most likely tokens that a graph returns; a request may ask for at most as many."""

# Less likely than this, relative to the most likely token, is 0 in float32: e**-88.
_LOWEST = -88.0
# Steps of a bisection: the last one is 3e-7 wide, which is how far float32 logits of the size of 4 lie apart.
_STEPS = tuple(-_LOWEST / 2**number for number in range(1, 29))
# Of the vocabulary, summed first.
_BLOCK = 256


class SamplingRows(NamedTuple):
    """How each row's token is drawn; each field [rows].

    Attributes:
        temperature: float32, 0 is greedy.
        top_k: float32, at least 1; the vocabulary's size keeps all. Up to 2**24, float32 counts exactly.
        top_p: float32, 1 keeps all.
        min_p: float32, 0 keeps all.
        repetition_penalty: float32, 1 changes nothing.
        presence_penalty: float32.
        frequency_penalty: float32.
        uniform: float32, in [0, 1).
        bans_endings: bool, for an output before `min_tokens`.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    uniform: torch.Tensor
    bans_endings: torch.Tensor


class SamplingTables(NamedTuple):
    """What the device keeps for each slot; each field [max_num_seqs + 1, vocab_size]. The last row is padding's.

    Attributes:
        bias: float32, added to the logits; -inf where a token is not allowed.
        is_ending: bool, tokens that `min_tokens` bans.
        is_in_prompt: bool.
        num_drawn: float32, how often a token was drawn; grows in the graph. Float, for the device adds no integers
            there.
    """

    bias: torch.Tensor
    is_ending: torch.Tensor
    is_in_prompt: torch.Tensor
    num_drawn: torch.Tensor


class SampledRows(NamedTuple):
    """What a graph returns.

    Attributes:
        token_ids: int32 [rows]; 0 in a row that is not finite.
        is_finite: bool [rows], of the model's logits.
        logprobs: float32 [rows], of the token, by the model's own logits.
        top_token_ids: int32 [rows, n].
        top_logprobs: float32 [rows, n], descending.
    """

    token_ids: torch.Tensor
    is_finite: torch.Tensor
    logprobs: torch.Tensor
    top_token_ids: torch.Tensor
    top_logprobs: torch.Tensor


def sample_rows(
    logits: torch.Tensor, rows: SamplingRows, tables: SamplingTables, slots: torch.Tensor, num_top: int = MAX_LOGPROBS
) -> SampledRows:
    """Chooses one token for each row and counts it in `tables.num_drawn`.

    Args:
        logits: float32 [rows, vocab_size].
        rows: how.
        tables: of every slot.
        slots: int64 [rows]; rows that share one are padding, whose count means nothing.
        num_top: most likely tokens to return, at most the vocabulary's size.
    """
    is_finite = (logits.abs() <= torch.finfo(torch.float32).max).all(dim=-1)
    given = torch.where(is_finite[:, None], logits, 0.0)
    num_drawn = tables.num_drawn.index_select(0, slots)
    adjusted = _adjust(given, rows, tables, slots, num_drawn)
    ids = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    largest = adjusted.amax(dim=-1, keepdim=True)
    greedy = torch.where(adjusted == largest, ids, logits.shape[-1]).amin(dim=-1)  # the first of equal ones
    drawn = _draw(adjusted - largest, rows)
    token_ids = torch.where(rows.temperature > 0, drawn, greedy)
    token_ids = torch.where(is_finite, token_ids, 0)
    tables.num_drawn.index_copy_(0, slots, num_drawn + (ids == token_ids[:, None]))
    logprobs = torch.log_softmax(given, dim=-1)
    top_logprobs, top_token_ids = logprobs.topk(num_top, dim=-1)
    chosen = logprobs.gather(1, token_ids.long()[:, None]).squeeze(1)
    return SampledRows(token_ids, is_finite, chosen, top_token_ids.int(), top_logprobs)


def _adjust(
    logits: torch.Tensor, rows: SamplingRows, tables: SamplingTables, slots: torch.Tensor, num_drawn: torch.Tensor
) -> torch.Tensor:
    """In the order of `sampler`: allowed tokens and biases, the ban of ending tokens, penalties."""
    logits = logits + tables.bias.index_select(0, slots)
    is_banned = tables.is_ending.index_select(0, slots) & rows.bans_endings[:, None]
    logits = torch.where(is_banned, float("-inf"), logits)
    was_drawn = num_drawn > 0
    is_seen = tables.is_in_prompt.index_select(0, slots) | was_drawn
    repetition = rows.repetition_penalty[:, None]
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    # A penalty near 0 or a large one makes a logit infinite, which no token could be drawn from.
    most = torch.finfo(torch.float32).max
    logits = torch.where(is_seen & (logits > float("-inf")), penalized.clamp(-most, most), logits)
    return logits - rows.frequency_penalty[:, None] * num_drawn - rows.presence_penalty[:, None] * was_drawn


def _draw(shifted: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """One token for each row, int32 [rows], of logits whose largest is 0."""
    # A temperature below the smallest normal float32 gives what that gives, the most likely token.
    scaled = shifted / rows.temperature.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    weights = scaled.exp()  # relative to the most likely token
    kept = torch.where(_keep_mask(scaled, weights, rows), weights, 0.0)
    blocks = _in_blocks(kept)
    sums = blocks.sum(dim=-1)
    upto = sums.cumsum(dim=-1)
    target = rows.uniform[:, None] * upto[:, -1:]
    block = _first_beyond(upto, target, sums)
    before = torch.where(_indices(sums) < block[:, None], upto, 0.0).amax(dim=-1, keepdim=True)
    inside = blocks.gather(1, block.long()[:, None, None].expand(-1, 1, _BLOCK)).squeeze(1)
    return block * _BLOCK + _first_beyond(inside.cumsum(dim=-1), target - before, inside)


def _first_beyond(upto: torch.Tensor, target: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """The first part that is not empty and where the running sum passes `target`, or the last that is not empty.

    However a device orders its additions, no part of weight 0 is chosen.

    Args:
        upto: float32 [rows, parts], the running sums.
        target: float32 [rows, 1].
        parts: float32 [rows, parts], none negative.

    Returns:
        int32 [rows].
    """
    indices = _indices(parts)
    first = torch.where((upto > target) & (parts > 0), indices, parts.shape[-1]).amin(dim=-1)
    last = torch.where(parts > 0, indices, 0).amax(dim=-1)
    return torch.minimum(first, last)


def _keep_mask(scaled: torch.Tensor, weights: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """True for the tokens that min_p, top_k and then top_p leave; at least one in each row.

    Args:
        scaled: float32 [rows, vocab_size], logits over temperature, the largest of each row 0.
        weights: their exponentials.
        rows: for the three filters.
    """
    likely_enough = (weights >= rows.min_p[:, None]).float().sum(dim=-1, keepdim=True)
    limit = torch.minimum(rows.top_k[:, None], likely_enough)
    ones = torch.ones_like(weights)
    last = _last_kept(scaled, ones, limit)
    num_above = _sum_above(scaled, ones, last)
    num_tied = torch.minimum(limit - num_above, (scaled == last).float().sum(dim=-1, keepdim=True))
    mass = _sum_above(scaled, weights, last) + num_tied * last.exp()

    goal = rows.top_p[:, None] * mass
    last_of_nucleus = _last_kept(scaled, weights, goal)
    rest = goal - _sum_above(scaled, weights, last_of_nucleus)
    num_tied_of_nucleus = (rest / last_of_nucleus.exp()).ceil().clamp(min=1)
    nucleus = _sum_above(scaled, ones, last_of_nucleus) + num_tied_of_nucleus
    is_shorter = (rows.top_p[:, None] < 1) & (nucleus < num_above + num_tied)
    last = torch.where(is_shorter, last_of_nucleus, last)
    num_tied = torch.where(is_shorter, num_tied_of_nucleus, num_tied)
    is_tied = scaled == last
    return (scaled > last) | (is_tied & (_running_sum(is_tied.float()) <= num_tied))


def _last_kept(scaled: torch.Tensor, parts: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """The smallest logit before which, in descending order, the parts add up to less than `limit`: float32 [rows, 1].

    Args:
        scaled: float32 [rows, vocab_size], the largest 0.
        parts: float32, of each logit, none negative.
        limit: float32 [rows, 1]; at or below 0 it is the largest logit.
    """
    low = torch.full_like(limit, _LOWEST)
    nothing = torch.zeros_like(parts)
    for step in _STEPS:
        middle = low + step
        low = torch.where(torch.where(scaled > middle, parts, nothing).sum(dim=-1, keepdim=True) < limit, low, middle)
    return torch.where(scaled > low, scaled, 0.0).amin(dim=-1, keepdim=True)


def _sum_above(scaled: torch.Tensor, parts: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    return torch.where(scaled > bound, parts, 0.0).sum(dim=-1, keepdim=True)


def _running_sum(parts: torch.Tensor) -> torch.Tensor:
    """Along each row, in two levels: no running sum longer than a block, or than the number of blocks."""
    blocks = _in_blocks(parts)
    sums = blocks.sum(dim=-1)
    before = sums.cumsum(dim=-1) - sums
    return (blocks.cumsum(dim=-1) + before[:, :, None]).flatten(1)[:, : parts.shape[-1]]


def _in_blocks(parts: torch.Tensor) -> torch.Tensor:
    """[rows, blocks, 256], the last block filled up with 0."""
    num_blocks = -(-parts.shape[-1] // _BLOCK)
    return F.pad(parts, (0, num_blocks * _BLOCK - parts.shape[-1])).view(parts.shape[0], num_blocks, _BLOCK)


def _indices(parts: torch.Tensor) -> torch.Tensor:
    return torch.arange(parts.shape[-1], device=parts.device, dtype=torch.int32)
