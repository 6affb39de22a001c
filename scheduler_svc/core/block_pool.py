"""The KV blocks of one executor: who holds which, and which free one is handed out next.

Block 0 is the null block and never handed out (K1). A block is free when nobody holds it; a free block may still have
cached content. Free blocks without cached content go first, as a stack: those of the request released last, its last
block first, and the never used ones by id at the bottom. Then cached ones, the one released longest ago first.
Everything is O(1) per block.
"""

from __future__ import annotations

import collections
import itertools
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from holdback.errors import InternalError
from scheduler_svc.core.prefix_cache import PrefixCache

Holder = TypeVar("Holder", bound=Hashable)
"""Whoever has blocks: a request. The pool only tells one from another."""


NULL_BLOCK = 0


class BlockPool(Generic[Holder]):
    """Holders and free lists of blocks 1 to `num_blocks` - 1.

    Attributes:
        num_usable: blocks without the null block.
        prefix_cache: told when a block with cached content is handed out again.
    """

    def __init__(self, num_blocks: int, prefix_cache: PrefixCache) -> None:
        self.num_usable = num_blocks - 1
        self.prefix_cache = prefix_cache
        # The holder of a block; of a shared one any of them, and all of them are in `_sharers`. Few blocks are shared.
        self._holder: list[Holder | None] = [None] * num_blocks
        self._sharers: dict[int, dict[Holder, None]] = {}
        self._free_plain = list(range(num_blocks - 1, 0, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those with cached content included."""
        return len(self._free_plain) + len(self._free_cached)

    def is_held(self, block_id: int) -> bool:
        return self._holder[block_id] is not None

    def holders(self, block_id: int) -> Collection[Holder]:
        """All holders of a block, in the order in which they came; not to be kept."""
        sharers = self._sharers.get(block_id)
        if sharers is not None:
            return sharers
        holder = self._holder[block_id]
        return () if holder is None else (holder,)

    def take(self, holder: Holder) -> int:
        """Takes one block for one holder; cached content in it is forgotten.

        Raises:
            InternalError: none is free. Admission must make this impossible (K3).
        """
        if self._free_plain:
            block_id = self._free_plain.pop()
        elif self._free_cached:
            block_id, _ = self._free_cached.popitem(last=False)
            self.prefix_cache.forget(block_id)
        else:
            raise InternalError(f"no block is free; all {self.num_usable} are held")
        self._holder[block_id] = holder
        return block_id

    def allocate(self, num_blocks: int, holder: Holder) -> list[int]:
        """Takes blocks for one holder, all or none.

        Raises:
            InternalError: fewer are free. Admission must make this impossible (K3).
        """
        if num_blocks > self.num_free:
            raise InternalError(f"allocate({num_blocks}) with {self.num_free} of {self.num_usable} blocks free")
        return [self.take(holder) for _ in range(num_blocks)]

    def hold(self, block_ids: Iterable[int], holder: Holder) -> None:
        """Adds a holder to cached blocks, free or held."""
        for block_id in block_ids:
            first = self._holder[block_id]
            if first is None:
                del self._free_cached[block_id]
                self._holder[block_id] = holder
            else:
                self._sharers.setdefault(block_id, {first: None})[holder] = None

    def release(self, block_ids: Sequence[int], holder: Holder) -> None:
        """Takes one holder from each block of its block table, the last block first.

        Raises:
            InternalError: it does not hold one of them.
        """
        plain: list[int] = []
        for block_id in reversed(block_ids):
            if block_id in self._sharers:
                self._leave_shared(block_id, holder)
                continue
            if self._holder[block_id] != holder:
                raise InternalError(f"block {block_id} is released by {holder!r}, which does not hold it")
            self._holder[block_id] = None
            if block_id in self.prefix_cache:
                self._free_cached[block_id] = None
            else:
                plain.append(block_id)
        # The last block of the table ends on top of the stack.
        self._free_plain.extend(reversed(plain))

    def _leave_shared(self, block_id: int, holder: Holder) -> None:
        sharers = self._sharers[block_id]
        if holder not in sharers:
            raise InternalError(f"block {block_id} is released by {holder!r}, which does not hold it")
        del sharers[holder]
        self._holder[block_id] = next(iter(sharers))
        if len(sharers) == 1:
            del self._sharers[block_id]

    def forget(self, block_id: int) -> None:
        """The content of a block is not to be offered any more; its holders keep it."""
        self.prefix_cache.forget(block_id)
        if block_id in self._free_cached:
            del self._free_cached[block_id]
            self._free_plain.append(block_id)

    def check_integrity(self, tables: Iterable[tuple[Holder, Sequence[int]]]) -> None:
        """Compares all holders with the block tables of all holders.

        Raises:
            InternalError: a block's holders are not those whose tables have it, or the free lists are not what nobody
                holds.
        """
        expected: dict[int, list[Holder]] = {}
        for holder, block_ids in tables:
            for block_id in block_ids:
                expected.setdefault(block_id, []).append(holder)
        self._check_holders(expected)
        self._check_free_lists(expected)

    # A pool may have a million blocks, of which few are held: what is asked of each of them is asked of whole lists.

    def _check_holders(self, expected: dict[int, list[Holder]]) -> None:
        for block_id, should_be in expected.items():
            held_by = list(self.holders(block_id))
            if len(held_by) != len(should_be) or set(held_by) != set(should_be) or block_id == NULL_BLOCK:
                raise InternalError(f"block {block_id} is held by {held_by}; block tables say {should_be}")
        num_held = len(self._holder) - self._holder.count(None)
        if num_held != len(expected) or not self._sharers.keys() <= expected.keys():
            held = {*self._sharers, *(b for b, holder in enumerate(self._holder) if holder is not None)}
            raise InternalError(f"blocks {_name(held - expected.keys())} are held; block tables say by nobody")

    def _check_free_lists(self, expected: dict[int, list[Holder]]) -> None:
        is_free = bytearray(len(self._holder))
        for free in (self._free_plain, self._free_cached):
            collections.deque(map(is_free.__setitem__, free, itertools.repeat(True)), maxlen=0)
        taken = _name(block_id for block_id in (NULL_BLOCK, *expected) if is_free[block_id])
        num_free = self.num_usable - len(expected)
        if taken or self.num_free != num_free or is_free.count(True) != num_free:
            raise InternalError(
                f"free lists hold {self.num_free} blocks, {is_free.count(True)} different ones, for {num_free} without "
                f"a holder; among them are held ones: {taken or 'none'}"
            )
        cached = self.prefix_cache.block_ids
        if not cached.isdisjoint(self._free_plain) or not self._free_cached.keys() <= cached:
            misplaced = {*(cached & set(self._free_plain)), *(self._free_cached.keys() - cached)}
            raise InternalError(f"blocks {_name(misplaced)} are in the wrong free list")


def _name(block_ids: Iterable[int]) -> str:
    """The first few, for people."""
    return ", ".join(map(str, sorted(block_ids)[:8]))
