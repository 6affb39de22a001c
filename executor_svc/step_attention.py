"""Paged attention inside a compiled step: the same as `attention.PagedContext`, with static shapes.

A graph has one context bucket, so a prefill gathers that many tokens from its block table and puts its own chunk behind
them, and a decode gathers that many with its own token among them. How much of that is real is data, so it is a mask.
What a row may not see is selected away, never multiplied by zero, in scores and in values: the null block, the sink and
the rest of a block may hold anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from executor_svc.attention import AttentionCall
from holdback.types import Phase

# Finite, so that a padding row, which sees nothing, gets weights that are numbers.
_HIDDEN = torch.finfo(torch.float32).min


class StaticContext:
    """What one step of one graph tells every layer's attention. Made afresh while the step is traced.

    Args:
        phase: of the graph.
        keys: KV memory by layer, [num_blocks + 1, block_size, num_kv_heads, head_dim]; written to.
        values: as `keys`.
        kv_rows: int64 [T] or [B], rows of the flat KV memory where each token's key and value go.
        block_tables: int64 [B, blocks], cut to the context bucket; None where the bucket is 0.
        visible: int64 [B], tokens of each row's gathered context that are real: before the chunk in a prefill, its own
            token included in a decode.
    """

    def __init__(
        self,
        phase: Phase,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        kv_rows: torch.Tensor,
        block_tables: torch.Tensor | None,
        visible: torch.Tensor,
    ) -> None:
        self._phase = phase
        self._keys = keys
        self._values = values
        self._kv_rows = kv_rows
        self._block_tables = block_tables
        self._visible = visible
        self._masks: dict[int | None, torch.Tensor] = {}

    def note(self, module: torch.nn.Module, attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
        """Nothing: the probe at load has seen it all."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Writes the call's keys and values, then attends."""
        for pages, new in ((self._keys[call.layer], call.key), (self._values[call.layer], call.value)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, self._kv_rows, new.transpose(1, 2).flatten(0, 1))
        return self._attend_prefill(call) if self._phase is Phase.PREFILL else self._attend_decode(call)

    def _attend_prefill(self, call: AttentionCall) -> torch.Tensor:
        key, value = call.key[0], call.value[0]
        if self._block_tables is not None:
            key = torch.cat([self._gather(self._keys[call.layer])[0], key], dim=1)
            value = torch.cat([self._gather_real(self._values[call.layer])[0], value], dim=1)
        num_heads, num_tokens, head_dim = call.query.shape[1:]
        # Query heads of a group share one key head: their queries lie behind each other.
        query = call.query[0].reshape(call.num_kv_heads, call.group_size * num_tokens, head_dim)
        scores = (query @ key.transpose(-1, -2)).view(call.num_kv_heads, call.group_size, num_tokens, -1)
        weights = _weigh(call, scores, self._mask(call.sliding_window, num_tokens, key.shape[1]))
        attended = weights.to(value.dtype).flatten(1, 2) @ value
        return attended.view(num_heads, num_tokens, head_dim).transpose(0, 1)[None]

    def _attend_decode(self, call: AttentionCall) -> torch.Tensor:
        key = self._gather(self._keys[call.layer])
        value = self._gather_real(self._values[call.layer])
        num_rows, num_heads, _, head_dim = call.query.shape
        query = call.query.reshape(num_rows, call.num_kv_heads, call.group_size, head_dim)
        scores = (query @ key.transpose(-1, -2))[:, :, :, None]
        weights = _weigh(call, scores, self._mask(call.sliding_window, 1, key.shape[2]))
        attended = weights[:, :, :, 0].to(value.dtype) @ value
        return attended.view(num_rows, 1, num_heads, head_dim)

    def _gather(self, pages: torch.Tensor) -> torch.Tensor:
        """The blocks of each row in order: [B, num_kv_heads, S, head_dim]."""
        assert self._block_tables is not None  # noqa: S101 - a decode has a context
        found = pages.index_select(0, self._block_tables.flatten())
        return found.view(self._block_tables.shape[0], -1, *pages.shape[2:]).transpose(1, 2)

    def _gather_real(self, pages: torch.Tensor) -> torch.Tensor:
        """As `_gather`, 0 where nothing of the row's own is."""
        found = self._gather(pages)
        return torch.where(self._is_real(found.shape[2])[:, None, :, None], found, 0.0)

    def _is_real(self, num_keys: int) -> torch.Tensor:
        return torch.arange(num_keys, device=self._visible.device) < self._visible[:, None]

    def _mask(self, window: int | None, num_tokens: int, num_keys: int) -> torch.Tensor:
        """True where a query may see a key; bool, broadcasts to scores. Made once for each window of the layers."""
        if window not in self._masks:
            make = self._prefill_mask if self._phase is Phase.PREFILL else self._decode_mask
            self._masks[window] = make(window, num_tokens, num_keys)
        return self._masks[window]

    def _prefill_mask(self, window: int | None, num_tokens: int, num_keys: int) -> torch.Tensor:
        """[T, S + T]: places of the chunk follow those that are real in the context, whatever lies between in memory.

        Causality goes by place in the sequence, never by position number.
        """
        num_gathered = num_keys - num_tokens
        start = self._visible
        queries = torch.arange(num_tokens, device=start.device)[:, None]
        own = torch.arange(num_tokens, device=start.device)
        sees = own <= queries
        if window is not None:
            sees = sees & (own > queries - window)
        if num_gathered == 0:
            return sees
        before = torch.arange(num_gathered, device=start.device)
        sees_before = (before < start).expand(num_tokens, -1)
        if window is not None:
            sees_before = sees_before & (before > start + queries - window)
        return torch.cat([sees_before, sees], dim=1)

    def _decode_mask(self, window: int | None, num_tokens: int, num_keys: int) -> torch.Tensor:
        """[B, 1, 1, 1, S]."""
        sees = self._is_real(num_keys)
        if window is not None:
            sees = sees & (torch.arange(num_keys, device=sees.device) >= self._visible[:, None] - window)
        return sees[:, None, None, None, :]


def _weigh(call: AttentionCall, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Softmax in float32, sinks taking part in it.

    Args:
        call: for scale, softcap and sinks.
        scores: [..., num_kv_heads, group_size, L, S], not scaled yet.
        mask: bool, broadcasts to `scores`.
    """
    scores = scores.float() * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = torch.where(mask, scores, _HIDDEN)
    if call.sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = call.sinks.float().view(call.num_kv_heads, call.group_size, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
