"""The KV blocks of one executor: who holds which, and which free one is handed out next.

Block 0 is the null block and never handed out (K1). A block is free when nobody holds it; a free block may still have
cached content. Free blocks without cached content go first, as a stack: those of the request released last, its last
block first, and the never used ones by id at the bottom. Then cached ones, the one released longest ago first.
Everything is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from holdback.errors import InternalError
from scheduler_svc.core.prefix_cache import PrefixCache


class BlockPool:
    """Reference counts and free lists of blocks 1 to `num_blocks` - 1.

    Attributes:
        num_usable: blocks without the null block.
        prefix_cache: told when a block with cached content is handed out again.
    """

    def __init__(self, num_blocks: int, prefix_cache: PrefixCache) -> None:
        self.num_usable = num_blocks - 1
        self.prefix_cache = prefix_cache
        self._num_holders = [0] * num_blocks
        self._free_plain = list(range(num_blocks - 1, 0, -1))
        self._free_cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those with cached content included."""
        return len(self._free_plain) + len(self._free_cached)

    def is_held(self, block_id: int) -> bool:
        return self._num_holders[block_id] > 0

    def take(self) -> int:
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
        self._num_holders[block_id] = 1
        return block_id

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes blocks for one holder, all or none.

        Raises:
            InternalError: fewer are free. Admission must make this impossible (K3).
        """
        if num_blocks > self.num_free:
            raise InternalError(f"allocate({num_blocks}) with {self.num_free} of {self.num_usable} blocks free")
        return [self.take() for _ in range(num_blocks)]

    def hold(self, block_ids: Iterable[int]) -> None:
        """Adds a holder to cached blocks, free or held."""
        for block_id in block_ids:
            if self._num_holders[block_id] == 0:
                del self._free_cached[block_id]
            self._num_holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Takes one holder from each block of a block table, the last block first.

        Raises:
            InternalError: a block has no holder.
        """
        plain: list[int] = []
        for block_id in reversed(block_ids):
            if self._num_holders[block_id] == 0:
                raise InternalError(f"block {block_id} is released but nobody holds it")
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] > 0:
                continue
            if block_id in self.prefix_cache:
                self._free_cached[block_id] = None
            else:
                plain.append(block_id)
        # The last block of the table ends on top of the stack.
        self._free_plain.extend(reversed(plain))

    def forget(self, block_id: int) -> None:
        """The content of a block is not to be offered any more; its holders keep it."""
        self.prefix_cache.forget(block_id)
        if block_id in self._free_cached:
            del self._free_cached[block_id]
            self._free_plain.append(block_id)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Compares all counts with the block tables of all holders.

        Raises:
            InternalError: a count differs from the number of holders, or the free lists are not what nobody holds.
        """
        expected = [0] * len(self._num_holders)
        for block_ids in holders:
            for block_id in block_ids:
                expected[block_id] += 1
        if expected != self._num_holders or expected[0]:
            raise InternalError(f"holders of blocks are counted as {self._num_holders}, block tables say {expected}")
        free = [*self._free_plain, *self._free_cached]
        if sorted(free) != [block_id for block_id, count in enumerate(expected) if block_id and not count]:
            raise InternalError(f"free lists hold {sorted(free)}, which are not the blocks without a holder")
        misplaced = [b for b in self._free_plain if b in self.prefix_cache]
        misplaced += [b for b in self._free_cached if b not in self.prefix_cache]
        if misplaced:
            raise InternalError(f"blocks {misplaced} are in the wrong free list")
