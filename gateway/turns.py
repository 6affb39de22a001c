"""Work that waits for one of a few places, so that a gateway that is sent more than it can work off keeps its memory.

What is small goes first, and what has waited long goes before what comes later: each place in the order is the time of
arrival and some patience more, the larger the work the longer. Size counts from the moment that work waits until
nothing holds its text any more: who leaves while waiting leaves nothing behind, and what is under way counts until it
is over, whether somebody still wants it or not. When it is too much, what stands last in the order is refused.

What is not covered: work that is under way is not stopped, so even the smallest waits until a place is free.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from holdback.errors import ResourceExhaustedError

RETRY_AFTER_S = 1.0
CALL_CHARS = 256
"""What each piece of work counts beside its text, however short that is."""

PATIENCE_S = 120.0
"""How long the largest work lets smaller work go before it. More than all that may wait takes: otherwise a text that is
sent after very many others would find those that have waited so long before it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """How work is taken in.

    Attributes:
        num_places: work that may be under way at once.
        max_chars: of all that waits and is under way; one text alone may have more.
        largest_chars: of the largest work, which has all of the patience; others have their share.
    """

    num_places: int
    max_chars: int
    largest_chars: int


@dataclass(eq=False, slots=True)
class _Waiting:
    order: float
    num_chars: int
    turn: asyncio.Future[None]


def _order(waiting: _Waiting) -> float:
    return waiting.order


class Turns:
    """One kind of work.

    Attributes:
        under_way: what has a place.
    """

    def __init__(self, work: str, limits: TurnLimits) -> None:
        """`work`: for people, for example "tokenized"."""
        self.under_way: set[asyncio.Future[Any]] = set()
        self._work = work
        self._limits = limits
        self._num_free = limits.num_places
        self._num_chars = 0
        self._waiting: list[_Waiting] = []  # in order; a place is free only while there are none

    async def run(self, num_chars: int, start: Callable[[], asyncio.Future[T]]) -> T:
        """The result of work that is started when its turn has come. Raises what it raises.

        Args:
            num_chars: of its text.
            start: starts it. Who is cancelled leaves it running.

        Raises:
            ResourceExhaustedError: too much waits already, or came meanwhile and goes before it.
        """
        num_chars += CALL_CHARS
        await self._turn(num_chars)
        try:
            work = start()
        except BaseException:
            self._let_go(num_chars)
            raise
        self.under_way.add(work)
        work.add_done_callback(partial(self._end, num_chars))
        return await asyncio.shield(work)

    async def _turn(self, num_chars: int) -> None:
        """Takes a place, and counts the text."""
        self._num_chars += num_chars
        if self._num_free:
            self._num_free -= 1
            return
        loop = asyncio.get_running_loop()
        entry = _Waiting(loop.time() + self._patience_s(num_chars), num_chars, loop.create_future())
        bisect.insort(self._waiting, entry, key=_order)
        self._refuse_the_last()
        try:
            await asyncio.shield(entry.turn)
        except asyncio.CancelledError:
            self._leave(entry)
            raise

    def _patience_s(self, num_chars: int) -> float:
        return PATIENCE_S * min(1.0, num_chars / self._limits.largest_chars)

    def _refuse_the_last(self) -> None:
        while self._num_chars > self._limits.max_chars and self._waiting:
            last = self._waiting.pop()
            self._num_chars -= last.num_chars
            error = ResourceExhaustedError(
                f"{self._num_chars} characters wait to be {self._work} and {last.num_chars} would be added; "
                f"allowed: {self._limits.max_chars} at once",
                retry_after_s=RETRY_AFTER_S,
            )
            last.turn.set_exception(error)

    def _leave(self, entry: _Waiting) -> None:
        """Of one that was cancelled: while it waited, at the moment it was given a place, or at that of its refusal."""
        if not entry.turn.done():
            first = bisect.bisect_left(self._waiting, entry.order, key=_order)
            del self._waiting[self._waiting.index(entry, first)]
            self._num_chars -= entry.num_chars
        elif entry.turn.exception() is None:
            self._let_go(entry.num_chars)

    def _end(self, num_chars: int, work: asyncio.Future[Any]) -> None:
        self.under_way.discard(work)
        self._let_go(num_chars)
        if not work.cancelled():
            work.exception()  # where nobody waits any more

    def _let_go(self, num_chars: int) -> None:
        """A place is free, which goes to the first in the order."""
        self._num_chars -= num_chars
        if self._waiting:
            self._waiting.pop(0).turn.set_result(None)
        else:
            self._num_free += 1
