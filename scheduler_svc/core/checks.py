"""The checks that hold a waiting request back, by name."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Check(enum.Enum):
    """What a request may fail, in the order in which it is asked. The first two are the dispatcher's, not the core's.

    Attributes:
        DRAINING: the lane takes no more requests.
        MOVES_USED_UP: one that is to run without another of its kind beside it.
        SLOTS: all of them are taken.
        PREFILL: another request prefills, or is let in to.
        KV_ADMISSION: the worst case does not fit KV memory.
        KV_BLOCKS: the prompt has no room now (K3).
        DECODE_FIRST: prefills have taken as long as they may.
    """

    DRAINING = "draining"
    MOVES_USED_UP = "moves_used_up"
    SLOTS = "slots"
    PREFILL = "prefill"
    KV_ADMISSION = "kv_admission"
    KV_BLOCKS = "kv_blocks"
    DECODE_FIRST = "decode_first"


class HeldBack(NamedTuple):
    """The check that a request fails now, and why in words with its numbers."""

    check: Check
    why: str
