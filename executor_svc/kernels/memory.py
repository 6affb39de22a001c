"""Memory for packed weights: in huge pages where the system has them.

A decode step reads every weight once, and with pages of 4 KiB finding where each page lies takes longer than it should,
most of all in a virtual machine, whose page tables are looked up in two levels.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

_HUGE_PAGE = 2 << 20
_LINE = 64


class WeightMemory:
    """One piece of memory that weights are taken from, one after the other; it lives as long as any of them.

    Args:
        sizes: numbers in each of them.
    """

    def __init__(self, sizes: list[int]) -> None:
        num_bytes = sum(_rounded(2 * size, _LINE) for size in sizes)
        # Rounded up, which leaves room to begin at a huge page's boundary; pages that nobody touches cost nothing.
        memory = mmap.mmap(
            -1, _rounded(num_bytes, _HUGE_PAGE) + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        with contextlib.suppress(AttributeError, OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        numbers = torch.frombuffer(memory, dtype=torch.bfloat16)
        self._left = numbers[-numbers.data_ptr() % _HUGE_PAGE // 2 :]

    def take(self, size: int) -> torch.Tensor:
        """The next `size` numbers: bfloat16 [size], zero, at the beginning of a cache line."""
        taken, self._left = self._left[:size], self._left[_rounded(2 * size, _LINE) // 2 :]
        return taken


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit
