"""Which cached blocks a request would hit if it were bound now (K7).

A request that waits is asked about in every step, so the question must not cost a walk over its prompt each time. A hit
has no gap, so a hit that was found can only get longer by the one block that it lacks next: as long as that is not
offered, what was found is the most that there can be.
"""

from __future__ import annotations

from typing import NamedTuple

from scheduler_svc.core.prefix_cache import PrefixCache
from scheduler_svc.core.request import Request


class Hit(NamedTuple):
    """What a request hits.

    Attributes:
        block_ids: cached blocks from the first on, without a gap, that leave at least one token to compute.
        next_key: of the block that would lengthen it; None where nothing can.
    """

    block_ids: list[int]
    next_key: bytes | None


class HitFinder:
    """Looks requests up in one lane's prefix cache."""

    def __init__(self, prefix_cache: PrefixCache, block_size: int, *, enabled: bool) -> None:
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self._enabled = enabled

    def find(self, request: Request) -> Hit:
        block_ids: list[int] = []
        if not self._enabled:
            return Hit(block_ids, None)
        for index in range((request.num_prefill_tokens - 1) // self._block_size):
            key = request.block_key(index, self._block_size)
            block_id = self._prefix_cache.find(key)
            if block_id is None:
                return Hit(block_ids, key)
            block_ids.append(block_id)
        return Hit(block_ids, None)

    def may_be_longer(self, hit: Hit) -> bool:
        """Whether a hit found earlier may have become longer. It may have become shorter either way."""
        return hit.next_key is not None and self._prefix_cache.find(hit.next_key) is not None
