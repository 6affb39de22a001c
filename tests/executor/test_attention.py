"""Paged attention against attention written out for one query after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor_svc.attention import AttentionCall, PagedContext, paged_attention
from executor_svc.kv_cache import KVCache, LayerShape
from holdback.types import Phase

BLOCK_SIZE = 4
NUM_BLOCKS = 12
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = 0.3
VARIANTS = [
    pytest.param({}, id="plain"),
    pytest.param({"sliding_window": 3}, id="window"),
    pytest.param({"softcap": 0.7}, id="softcap"),
    pytest.param({"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, id="sinks"),
    pytest.param({"sliding_window": 3, "softcap": 0.7, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}, id="all"),
]


class Tokens:
    """Random queries, keys and values of one sequence, and the blocks it owns."""

    def __init__(self, length: int, table: list[int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length = length
        self.table = table
        self.query = torch.randn(HEADS, length, HEAD_DIM, generator=generator)
        self.key = torch.randn(KV_HEADS, length, HEAD_DIM, generator=generator)
        self.value = torch.randn(KV_HEADS, length, HEAD_DIM, generator=generator)

    def rows(self, start: int, end: int) -> list[int]:
        return [self.table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in range(start, end)]

    def expected(
        self,
        place: int,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the query at `place` attends to: [heads, head_dim], from the definition."""
        first = 0 if sliding_window is None else max(0, place + 1 - sliding_window)
        attended = []
        for head in range(HEADS):
            keys, values = self.key[head // 2, first : place + 1], self.value[head // 2, first : place + 1]
            scores = (keys @ self.query[head, place] * SCALE).tolist()
            if softcap is not None:
                scores = [softcap * math.tanh(score / softcap) for score in scores]
            weights = [math.exp(score) for score in scores]
            total = sum(weights) + (0 if sinks is None else math.exp(float(sinks[head])))
            attended.append(sum(weight / total * value for weight, value in zip(weights, values, strict=True)))
        return torch.stack([torch.as_tensor(one) for one in attended])


def new_cache() -> KVCache:
    return KVCache([LayerShape(KV_HEADS, HEAD_DIM)], NUM_BLOCKS, BLOCK_SIZE, torch.float32)


def prefill(
    cache: KVCache, sequence: Tokens, start: int, end: int, padding: int = 0, filler: float = 9.0, **variant: Any
) -> torch.Tensor:
    """Runs tokens [start, end) as a chunk with `padding` tokens of `filler` after it: [tokens, heads, head_dim]."""

    def padded(part: torch.Tensor) -> torch.Tensor:
        chunk = part[None, :, start:end]
        return torch.cat([chunk, torch.full((1, chunk.shape[1], padding, HEAD_DIM), filler)], dim=2)

    context = PagedContext(
        cache=cache,
        phase=Phase.PREFILL,
        rows=cache.rows_for(torch.tensor([*sequence.rows(start, end), *[-1] * padding])),
        block_tables=torch.tensor([sequence.table + [0] * (8 - len(sequence.table))]),
        context_lens=torch.tensor([end]),
        longest_context=end,
        num_tokens=end - start,
    )
    query, key, value = padded(sequence.query), padded(sequence.key), padded(sequence.value)
    return context.attend(AttentionCall(0, query, key, value, SCALE, **variant))[0]


def decode(cache: KVCache, sequences: list[Tokens], *, padding: int = 0, **variant: Any) -> torch.Tensor:
    """The last token of each sequence in one batch with `padding` rows after it: [rows, heads, head_dim]."""

    def batched(pick: Callable[[Tokens], torch.Tensor]) -> torch.Tensor:
        rows = [pick(sequence)[:, -1:] for sequence in sequences]
        return torch.stack([*rows, *[torch.zeros_like(rows[0])] * padding])

    lengths = [sequence.length for sequence in sequences] + [0] * padding
    rows = [sequence.rows(sequence.length - 1, sequence.length)[0] for sequence in sequences] + [-1] * padding
    context = PagedContext(
        cache=cache,
        phase=Phase.DECODE,
        rows=cache.rows_for(torch.tensor(rows)),
        block_tables=torch.tensor([one.table + [0] * (8 - len(one.table)) for one in sequences] + [[0] * 8] * padding),
        context_lens=torch.tensor(lengths),
        longest_context=max(lengths),
        num_tokens=len(sequences),
    )
    query = batched(lambda one: one.query)
    key, value = batched(lambda one: one.key), batched(lambda one: one.value)
    return context.attend(AttentionCall(0, query, key, value, SCALE, **variant))[:, 0]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("start", [0, 1, 4, 6])
def test_a_chunk_sees_what_was_computed_before_it_and_itself(start: int, variant: dict[str, Any]) -> None:
    cache, sequence = new_cache(), Tokens(10, [7, 2, 5], seed=1)
    if start:
        prefill(cache, sequence, 0, start)
    found = prefill(cache, sequence, start, 10, padding=3, **variant)
    for place in range(start, 10):
        assert_close(found[place - start], sequence.expected(place, **variant))
    assert not found[10 - start :].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_rows_see_their_own_history_whatever_its_length(variant: dict[str, Any]) -> None:
    cache = new_cache()
    sequences = [Tokens(10, [7, 2, 5], seed=1), Tokens(1, [3], seed=2), Tokens(8, [9, 4], seed=3)]
    for sequence in sequences:
        if sequence.length > 1:
            prefill(cache, sequence, 0, sequence.length - 1)
    found = decode(cache, sequences, padding=1, **variant)
    for row, sequence in enumerate(sequences):
        assert_close(found[row], sequence.expected(sequence.length - 1, **variant))


def test_long_chunks_with_capped_scores_are_sliced_without_a_seam() -> None:
    cache = KVCache([LayerShape(KV_HEADS, HEAD_DIM)], 70, BLOCK_SIZE, torch.float32)
    sequence = Tokens(270, list(range(1, 69)), seed=4)
    found = prefill(cache, sequence, 0, 270, softcap=0.7)
    for place in (0, 127, 128, 129, 256, 269):
        assert_close(found[place], sequence.expected(place, softcap=0.7))


@pytest.mark.case("B26")
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_belongs_to_nobody_or_to_others_cannot_leak(variant: dict[str, Any]) -> None:
    """NaN in every block and slot that a row does not own, and in the padding tokens themselves."""
    cache = new_cache()
    for pages in (cache.keys[0], cache.values[0]):
        pages.fill_(float("nan"))
    sequences = [Tokens(10, [7, 2, 5], seed=1), Tokens(2, [3], seed=2)]
    first = prefill(cache, sequences[0], 0, 6, padding=2, filler=float("nan"), **variant)
    second = prefill(cache, sequences[0], 6, 9, padding=5, filler=float("nan"), **variant)
    prefill(cache, sequences[1], 0, 1, padding=3, filler=float("nan"))
    decoded = decode(cache, sequences, padding=2, **variant)
    for place, found in [(5, first[5]), (8, second[2]), (9, decoded[0])]:
        assert_close(found, sequences[0].expected(place, **variant))
    assert_close(decoded[1], sequences[1].expected(1, **variant))
    assert torch.isfinite(decoded).all(), "a padding row must not be NaN either: experts would route it"


def test_a_model_that_drops_keyword_arguments_is_named() -> None:
    tensor = torch.zeros(1, 1, 1, 1)
    with pytest.raises(TypeError, match="Linear does not pass on the keyword arguments"):
        paged_attention(torch.nn.Linear(1, 1), tensor, tensor, tensor, None)
