"""Paged attention for the models of transformers, registered there as one attention implementation.

A model is called with `use_cache=False` and one more keyword argument, `holdback`, which its layers pass through to
`paged_attention` untouched. With a `PagedContext` there, new keys and values are first written into their blocks, and
then each query attends to what the block tables show: a chunk of a prefill sees the chunks before it and a prefix hit,
a decode row its history.

Causality goes by a token's place in its context, never by its position number. What a row may not see is selected away,
never multiplied by zero: the null block, the sink and the rest of a last block may hold anything, NaN included, for
their content is somebody else's.

Not covered: encoder and cross attention, keys and values of different sizes, attention dropout. `model_probe` refuses a
model that asks for any of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody knows
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from executor_svc.kernels.native import HEAD_DIMS, NativeKernels, Pages
from executor_svc.kv_cache import KVCache
from holdback.buckets import blocks_for
from holdback.types import Phase

IMPLEMENTATION = "holdback_paged"
"""Name to choose with `attn_implementation`. It has no mask function, so models hand over `attention_mask=None`."""

# Where the fused kernel cannot be used, scores of this many queries are held at once: [heads, 128, context].
_QUERY_SLICE = 128


@dataclass(slots=True)
class AttentionCall:
    """What one layer asks for.

    Attributes:
        layer: index of the layer, and of its KV memory.
        query: [1, heads, T, head_dim] in a prefill, [B, heads, 1, head_dim] in a decode.
        key: the same with `num_kv_heads`; query heads share them in groups of equal size.
        value: as `key`.
        scale: factor on the scores.
        sliding_window: tokens that a query sees, itself included; None sees all.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: [heads], a score per head that takes part in the softmax and has no value.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1]

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.key.shape[1]


class AttentionContext(Protocol):
    """What `holdback` may be: something that answers a layer's call."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Returns [1, T, heads, head_dim] or [B, 1, heads, head_dim]."""

    def note(self, module: torch.nn.Module, attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
        """Sees what a layer passes besides, before `attend`."""


def register() -> None:
    """Makes `IMPLEMENTATION` known to transformers. Calling it again changes nothing."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, paged_attention)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    holdback: AttentionContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers' attention layers call; see `AttentionCall` for the arguments."""
    if holdback is None:
        raise TypeError(f"{type(module).__name__} does not pass on the keyword arguments that its model is called with")
    holdback.note(module, attention_mask, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return holdback.attend(AttentionCall(layer, query, key, value, scale, sliding_window, softcap, s_aux)), None


@dataclass(slots=True)
class PagedContext:
    """What one step tells every layer's attention. Made afresh for each step, from the step's static-shape inputs.

    Attributes:
        cache: KV memory.
        phase: PREFILL: T tokens of one sequence. DECODE: one token of each of B sequences.
        rows: int64 [T] or [B], rows of the flat cache where each token's key and value go; the sink for padding.
        block_tables: int64 [1 or B, blocks], at least as long as the longest context needs; cut to real rows.
        context_lens: int64 [1 or B], visible tokens, those of this step included; cut to real rows.
        longest_context: the largest of `context_lens`, >= 1.
        num_tokens: real tokens of a prefill, the first of the T; real rows of a decode, the first of the B.
        kernels: compute in bfloat16 what they can; None leaves everything to PyTorch.
    """

    cache: KVCache
    phase: Phase
    rows: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    longest_context: int
    num_tokens: int
    kernels: NativeKernels | None = None
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _hidden_rows: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Cuts the block tables to real rows and to what the longest context needs: both are data on a CPU.

        In multiples of 16 tokens, so that no row's last keys are handled apart from the vectors before them: then a row
        gets the same bits whatever the longest context of its batch is.
        """
        num_rows = 1 if self.phase is Phase.PREFILL else self.num_tokens
        longest = blocks_for(self.longest_context, 16) * 16
        num_blocks = blocks_for(longest, self.cache.block_size)
        self.block_tables = self.block_tables[:num_rows, :num_blocks]
        self.context_lens = self.context_lens[:num_rows]

    def note(self, module: torch.nn.Module, attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
        """Nothing: the probe at load has seen it all."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Writes the call's keys and values, then attends."""
        key, value = call.key.transpose(1, 2).flatten(0, 1), call.value.transpose(1, 2).flatten(0, 1)
        self.cache.write(call.layer, self.rows, key, value)
        if self.kernels is not None and _suits_kernels(call):
            return self._attend_natively(self.kernels, call)
        return self._attend_prefill(call) if self.phase is Phase.PREFILL else self._attend_decode(call)

    def _attend_natively(self, kernels: NativeKernels, call: AttentionCall) -> torch.Tensor:
        """Zero for padding tokens and rows. See `executor_svc.kernels`."""
        keys, values = self.cache.keys[call.layer], self.cache.values[call.layer]
        heads, head_dim = call.query.shape[1], call.query.shape[3]
        pages = Pages(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            block_size=self.cache.block_size,
            kv_heads=call.num_kv_heads,
            heads=heads,
            head_dim=head_dim,
            scale=call.scale,
            window=call.sliding_window or 0,
        )
        query = call.query.transpose(1, 2)  # [1, T, heads, head_dim] or [B, 1, heads, head_dim]
        real = query.flatten(0, 1)[: self.num_tokens].contiguous()
        if self.phase is Phase.PREFILL:
            start = self.longest_context - self.num_tokens
            attended = kernels.prefill_attention(pages, real, self.block_tables[0], start)
        else:
            attended = kernels.decode_attention(pages, real, self.block_tables, self.context_lens)
        num_padding = query.shape[0] * query.shape[1] - self.num_tokens
        return F.pad(attended, (0, 0, 0, 0, 0, num_padding)).view(query.shape)

    def _attend_prefill(self, call: AttentionCall) -> torch.Tensor:
        """Zero for padding tokens, whose keys and values are read by nobody."""
        num_tokens, context = self.num_tokens, self.longest_context
        groups = (call.num_kv_heads, call.group_size)
        query = call.query[0, :, :num_tokens].reshape(*groups, num_tokens, -1)
        if context == num_tokens:  # nothing before this chunk: no need to read back what was written
            key, value = call.key[0, :, :num_tokens], call.value[0, :, :num_tokens]
        else:
            pages = self.cache.gather(call.layer, self.block_tables)
            key, value = (page[0, :context].transpose(0, 1) for page in pages)
        sees_all = call.sliding_window is None or context <= call.sliding_window
        if context > num_tokens and sees_all and call.softcap is None and call.sinks is None:
            real = _attend_history_and_chunk(query, key, value, call.scale).flatten(0, 1).transpose(0, 1)[None]
            return F.pad(real, (0, 0, 0, 0, 0, call.query.shape[2] - num_tokens))
        # Query heads of a group share one key head without a copy: a dimension of size 1 that broadcasts.
        shared = (*groups, context, key.shape[-1])
        key, value = key[:, None].expand(shared), value[:, None].expand(shared)
        if call.softcap is not None or call.sinks is not None:
            attended = self._attend_in_slices(call, query, key, value)
        elif context == num_tokens and sees_all:
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=call.scale)
        else:
            mask = self._mask(call.sliding_window)
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.scale)
        real = attended.flatten(0, 1).transpose(0, 1)[None]
        return F.pad(real, (0, 0, 0, 0, 0, call.query.shape[2] - num_tokens))

    def _attend_in_slices(
        self, call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        mask = self._mask(call.sliding_window)
        sinks = None if call.sinks is None else call.sinks.view(call.num_kv_heads, call.group_size, 1, 1)
        slices = zip(torch.split(query, _QUERY_SLICE, dim=2), torch.split(mask, _QUERY_SLICE), strict=True)
        return torch.cat([_attend_plainly(call, part, key, value, visible, sinks) for part, visible in slices], dim=2)

    def _attend_decode(self, call: AttentionCall) -> torch.Tensor:
        """Zero for padding rows, for which nothing is gathered."""
        num_rows = self.num_tokens
        key, value = self.cache.gather(call.layer, self.block_tables)
        for pages in (key, value):
            pages.flatten(0, 1).index_fill_(0, self._hidden(), 0)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        query = call.query[:num_rows].reshape(num_rows, call.num_kv_heads, call.group_size, -1)
        mask = self._mask(call.sliding_window)
        if call.softcap is None and call.sinks is None:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=call.scale)
        else:
            sinks = None if call.sinks is None else call.sinks.view(1, call.num_kv_heads, call.group_size, 1)
            attended = _attend_plainly(call, query, key, value, mask, sinks)
        real = attended.reshape(num_rows, 1, call.query.shape[1], -1)
        return F.pad(real, (0, 0, 0, 0, 0, 0, 0, call.query.shape[0] - num_rows))

    def _mask(self, sliding_window: int | None) -> torch.Tensor:
        """True where a query may see a key: bool [num_tokens, context] in a prefill, [rows, 1, 1, S] in a decode.

        Made once a step for each window that its layers have.
        """
        if sliding_window not in self._masks:
            make = self._prefill_mask if self.phase is Phase.PREFILL else self._decode_mask
            self._masks[sliding_window] = make(sliding_window)
        return self._masks[sliding_window]

    def _prefill_mask(self, sliding_window: int | None) -> torch.Tensor:
        keys = torch.arange(self.longest_context)
        queries = keys[-self.num_tokens :, None]
        visible = keys <= queries
        return visible if sliding_window is None else visible & (keys > queries - sliding_window)

    def _decode_mask(self, sliding_window: int | None) -> torch.Tensor:
        lengths = self.context_lens[:, None]
        keys = torch.arange(self.block_tables.shape[1] * self.cache.block_size)
        visible = keys < lengths
        if sliding_window is not None:
            visible &= keys >= lengths - sliding_window
        return visible[:, None, None, :]

    def _hidden(self) -> torch.Tensor:
        """Rows of gathered pages, flattened over rows and S, that hold nothing of their own sequence; int64."""
        if self._hidden_rows is None:
            keys = torch.arange(self.block_tables.shape[1] * self.cache.block_size)
            self._hidden_rows = (keys >= self.context_lens[:, None]).flatten().nonzero().flatten()
        return self._hidden_rows


def _attend_history_and_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """A chunk that sees all of its history and, causally, itself: two parts joined by the sums of their softmaxes.

    Without a mask, which in float32 costs a third to half of the time.

    Args:
        query: [kv_heads, group, T, head_dim].
        key: [kv_heads, S, head_dim], the last T of them the chunk's own.
        value: as `key`.
        scale: factor on the scores.
    """
    num_kv_heads, group_size, num_tokens, head_dim = query.shape
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    history = key.shape[1] - num_tokens
    folded = query.flatten(1, 2)[None]  # the queries of a group share their keys
    seen, seen_sum = attend(folded, key[None, :, :history], value[None, :, :history], scale=scale)
    shared = (num_kv_heads, group_size, num_tokens, head_dim)
    own_key, own_value = (part[:, None, history:].expand(shared) for part in (key, value))
    own, own_sum = attend(query, own_key, own_value, is_causal=True, scale=scale)
    # Sums are logarithms: [1, kv_heads, group * T] and [kv_heads, group, T].
    share = torch.sigmoid(seen_sum.view(own_sum.shape) - own_sum)[..., None]
    return torch.lerp(own.float(), seen.view(shared).float(), share).to(query.dtype)


def _suits_kernels(call: AttentionCall) -> bool:
    is_plain = call.softcap is None and call.sinks is None
    return is_plain and call.query.dtype is torch.bfloat16 and call.query.shape[3] in HEAD_DIMS


def _attend_plainly(
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with capped scores or sinks, which the fused kernel does not know. Softmax in float32.

    Args:
        call: for scale and softcap.
        query: [..., L, head_dim].
        key: [..., S, head_dim].
        value: as `key`.
        mask: bool, broadcasts to [..., L, S].
        sinks: broadcasts to [..., L, 1], or None.
    """
    scores = (query @ key.transpose(-1, -2)).float() * call.scale
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value
