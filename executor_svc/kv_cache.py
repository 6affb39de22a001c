"""Paged KV memory: per layer one tensor of keys and one of values, cut into blocks of `block_size` tokens.

The scheduler owns the block tables; this is only the memory behind them. Block 0 is the null block: block tables are
filled up with it, so it is gathered and masked, and never written. One block more than `num_blocks`, the last, is the
sink: what padding tokens write goes there, and nothing reads it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token, for keys and for values alike."""

    num_kv_heads: int
    head_dim: int


class KVCache:
    """KV memory of all layers, zeroed.

    Args:
        layers: what each keeps of a token.
        num_blocks: usable blocks and the null block.
        block_size: tokens per block.
        dtype: of keys and values.
        device: where the tensors are, and stay the same ones for good; None for this machine's memory.

    Attributes:
        num_blocks: usable blocks and the null block; the sink is one more.
        block_size: tokens per block.
        keys: per layer [num_blocks + 1, block_size, num_kv_heads, head_dim].
        values: the same shapes.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers = list(layers)
        self._dtype = dtype
        self._device = device
        self.keys, self.values = self._allocate(), self._allocate()

    @property
    def sink_slot(self) -> int:
        """First slot of the sink block."""
        return self.num_blocks * self.block_size

    def reset(self) -> None:
        """Zeroes everything."""
        if self._device is None:
            self.keys, self.values = self._allocate(), self._allocate()
            return
        for pages in (*self.keys, *self.values):
            pages.zero_()

    def _allocate(self) -> list[torch.Tensor]:
        """Of fresh pages, which the system zeroes when they are first written: what nobody uses is never resident.

        numpy asks for such pages; torch fills memory itself, which makes all of it resident at once. That is what a
        device of its own is for.
        """
        tensors = []
        for layer in self._layers:
            shape = (self.num_blocks + 1, self.block_size, layer.num_kv_heads, layer.head_dim)
            if self._device is not None:
                tensors.append(torch.zeros(shape, dtype=self._dtype, device=self._device))
                continue
            num_bytes = math.prod(shape) * self._dtype.itemsize
            tensors.append(torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(self._dtype).view(shape))
        return tensors

    def rows_for(self, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Rows of the flat cache for `slot_mapping` (int [T]); -1 becomes the sink. int64 [T]."""
        return torch.where(slot_mapping < 0, self.sink_slot, slot_mapping).long()

    def write(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores one key and one value per token.

        Args:
            layer: which.
            rows: int64 [T], as `rows_for` gives them.
            key: [T, num_kv_heads, head_dim].
            value: the same.
        """
        self.keys[layer].flatten(0, 1).index_copy_(0, rows, key)
        self.values[layer].flatten(0, 1).index_copy_(0, rows, value)

    def gather(self, layer: int, block_tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the blocks of each row in order, each [B, blocks * block_size, num_kv_heads, head_dim].

        Args:
            layer: which.
            block_tables: int64 [B, blocks].
        """
        return self._gather(self.keys[layer], block_tables), self._gather(self.values[layer], block_tables)

    def _gather(self, pages: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
        # index_select copies whole blocks; indexing with the table itself takes 3 to 7 times as long.
        found = pages.flatten(1).index_select(0, block_tables.flatten())
        return found.view(block_tables.shape[0], -1, *pages.shape[2:])


def block_bytes(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of all layers."""
    return 2 * block_size * dtype.itemsize * sum(layer.num_kv_heads * layer.head_dim for layer in layers)
