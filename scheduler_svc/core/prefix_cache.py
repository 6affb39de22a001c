"""Which block holds which tokens: the index of the prefix cache.

A full block is known by a key that covers everything before it: the key of the block before it, its own exact token
ids, and at the root whatever else must be equal for sharing, such as the cache salt. Different inputs give different
bytes to hash (every part has a tag and a length, or a fixed length), so two keys are equal only when all of it is.

Not here: how long a block stays in memory. `BlockPool` decides that and tells this index when a block is handed out
again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, KeysView, Sequence
from typing import NamedTuple

KEY_BYTES = 32


def root_key(extras: Iterable[tuple[str, str]]) -> bytes:
    """The parent of a first block: (name, value) pairs that must agree for two requests to share blocks.

    Order matters. The encoding is injective: each name and each value comes after its own length.
    """
    encoded = bytearray(b"root")
    for name, value in extras:
        for part in (name.encode(), value.encode("utf-8", "surrogatepass")):
            encoded += len(part).to_bytes(8, "little") + part
    return hashlib.sha256(encoded).digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a full block: 32 bytes that cover `parent` (32 bytes) and the exact ids, each in [0, 2**32)."""
    return hashlib.sha256(b"block" + parent + array("I", token_ids).tobytes()).digest()


class PrefixCacheStats(NamedTuple):
    """Counts over the whole life of a cache, in tokens."""

    queries: int
    hits: int


class PrefixCache:
    """Key to blocks, and back. Blocks with equal content are all kept; the one published first is offered.

    Attributes:
        queries: prompt tokens of the requests that looked for a hit; each request counts once in its life.
        hits: how many of them were hit.
    """

    def __init__(self) -> None:
        self._keys: dict[int, bytes] = {}
        self._offered: dict[bytes, int] = {}
        # Copies published later than the offered one, in that order; few keys have any.
        self._copies: dict[bytes, dict[int, None]] = {}
        self.queries = 0
        self.hits = 0

    def __len__(self) -> int:
        """Number of published blocks."""
        return len(self._keys)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._keys

    @property
    def block_ids(self) -> KeysView[int]:
        """The published blocks."""
        return self._keys.keys()

    def find(self, key: bytes) -> int | None:
        return self._offered.get(key)

    def publish(self, block_id: int, key: bytes) -> None:
        """Offers a block under its key. A block is published at most once until it is forgotten."""
        if block_id in self._keys:
            raise ValueError(f"block {block_id} is already published")
        self._keys[block_id] = key
        if self._offered.setdefault(key, block_id) != block_id:
            self._copies.setdefault(key, {})[block_id] = None

    def forget(self, block_id: int) -> None:
        """No longer offers a block; nothing happens when it is not published."""
        key = self._keys.pop(block_id, None)
        if key is None:
            return
        copies = self._copies.get(key, {})
        if self._offered[key] != block_id:
            del copies[block_id]
        elif copies:
            self._offered[key] = next(iter(copies))
            del copies[self._offered[key]]
        else:
            del self._offered[key]
        if key in self._copies and not copies:
            del self._copies[key]

    def clear(self) -> None:
        """Forgets every block; the counts stay."""
        self._keys.clear()
        self._offered.clear()
        self._copies.clear()

    def count_query(self, num_tokens: int, num_hit_tokens: int) -> None:
        self.queries += num_tokens
        self.hits += num_hit_tokens
