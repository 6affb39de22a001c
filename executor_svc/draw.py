"""Drawing tokens from rows of logits, so that a row's token depends on that row alone.

A request must get the same tokens whoever shares its batch (`seed` promises it), so nothing here reduces across rows,
and every sum of fractions along a row is one that runs in order (`cumsum`) or row by row (`softmax`): `sum` would add
in another order when a row is alone. Equal logits are ranked by token id, the lower first, wherever a rank matters.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from holdback.types import SamplingParams

# Sorting a whole vocabulary takes longer than the model's last layer; nearly all mass is in this many tokens.
_FIRST_SORTED = 256


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    """One token for each row, by inversion of its distribution function over token ids.

    Args:
        logits: float32 [rows, vocab_size]; -inf excludes a token, at least one is finite.
        params: of each row; temperature above 0.
        uniform: float32 [rows], in [0, 1).

    Returns:
        int64 [rows], of the vocabulary even where no logit is finite.
    """
    temperature = torch.tensor([row.temperature for row in params], dtype=torch.float32)
    # Subtracting first keeps the quotient at or below 0, so that no temperature overflows; one below the smallest
    # normal float32 gives what that gives, the most likely token.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    scaled = shifted / temperature.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    probabilities = torch.softmax(scaled, dim=-1)
    filtered = [row for row, param in enumerate(params) if _filters(param, logits.shape[-1])]
    if filtered:
        keep = keep_mask(scaled[filtered], [params[row] for row in filtered])
        probabilities[filtered] = torch.where(keep, probabilities[filtered], 0.0)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    # A float32 below 1 is far enough below it for the product to stay below the total in float64.
    target = uniform.double()[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def _filters(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1 or params.min_p > 0 or (params.top_k is not None and params.top_k < vocab_size)


def keep_mask(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """True for the tokens that min_p, top_k and then top_p leave: bool [rows, vocab_size], at least one in each row.

    Each of the three keeps a number of the most likely tokens; top_p counts probability among those that the other two
    left. So it is enough to know how many tokens stay, and the logit of the last one.

    Args:
        scaled: float32 [rows, vocab_size], logits over temperature, the largest of each row 0.
        params: of each row.
    """
    vocab_size = scaled.shape[-1]
    top_k = torch.tensor([vocab_size if row.top_k is None else min(row.top_k, vocab_size) for row in params])
    top_p = torch.tensor([row.top_p for row in params], dtype=torch.float64)
    min_p = torch.tensor([row.min_p for row in params], dtype=torch.float64)
    limited = top_k[top_k < vocab_size]
    width = min(vocab_size, max(_FIRST_SORTED, int(limited.max()) if len(limited) else 0))
    ranked = scaled.topk(width, dim=-1).values
    kept, is_certain = _num_kept(scaled, ranked, top_k, top_p, min_p)
    if not is_certain:
        ranked = scaled.sort(dim=-1, descending=True).values
        kept, _ = _num_kept(scaled, ranked, top_k, top_p, min_p)
    last = ranked.gather(1, kept[:, None] - 1)
    is_tied = scaled == last
    num_tied = kept[:, None] - (scaled > last).sum(dim=-1, keepdim=True)
    return (scaled > last) | (is_tied & (is_tied.cumsum(dim=-1) <= num_tied))


def _num_kept(
    scaled: torch.Tensor, ranked: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """How many of the most likely tokens stay in each row, int64 [rows]; and whether `ranked` was long enough to tell.

    Args:
        scaled: as in `keep_mask`.
        ranked: float32 [rows, width], the largest of each row in descending order.
        top_k: int64 [rows].
        top_p: float64 [rows].
        min_p: float64 [rows].
    """
    vocab_size, width = scaled.shape[-1], ranked.shape[-1]
    weights = ranked.double().exp()  # relative to the most likely token, whose weight is 1
    likely_enough = (weights >= min_p[:, None]).sum(dim=-1)
    likely_enough[min_p == 0] = vocab_size
    is_certain = bool(((likely_enough < width) | (likely_enough >= vocab_size) | (top_k <= width)).all())
    kept = torch.minimum(top_k, likely_enough)
    cumulative = weights.cumsum(dim=-1)
    whole = torch.softmax(scaled, dim=-1).amax(dim=-1).double().reciprocal()
    among = cumulative.gather(1, kept.clamp(max=width)[:, None] - 1).squeeze(-1)
    mass = torch.where(kept < vocab_size, among, whole)
    before = cumulative - weights
    nucleus = (before < (top_p * mass)[:, None]).sum(dim=-1).clamp(min=1)
    nucleus[top_p >= 1] = vocab_size
    is_certain &= bool(((nucleus < width) | (kept <= width) | (top_p >= 1)).all())
    return torch.minimum(kept, nucleus), is_certain
