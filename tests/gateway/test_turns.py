"""What is small goes first, what has waited long is not overtaken for ever, and nothing is held that does not count."""

from __future__ import annotations

import asyncio
import gc
import weakref
from functools import partial

import pytest

from gateway.turns import CALL_CHARS, PATIENCE_S, TurnLimits, Turns
from holdback.errors import ResourceExhaustedError


class Works:
    """Work that ends when the test says so, in one place at a time."""

    def __init__(self, max_chars: int = 10_000) -> None:
        self.turns = Turns("done", TurnLimits(1, max_chars, largest_chars=1000 + CALL_CHARS))
        self.started: list[str] = []
        self.done: dict[str, asyncio.Future[str]] = {}
        self.tasks: dict[str, asyncio.Task[str]] = {}

    async def add(self, name: str, num_chars: int) -> asyncio.Task[str]:
        task = self.tasks[name] = asyncio.create_task(self.turns.run(num_chars, lambda: self._start(name)))
        await settle()
        return task

    def _start(self, name: str) -> asyncio.Future[str]:
        self.started.append(name)
        self.done[name] = asyncio.get_running_loop().create_future()
        return self.done[name]

    async def end(self, name: str) -> None:
        self.done[name].set_result(name)
        await settle()

    async def end_all(self) -> list[str]:
        """Ends what is under way, one after the other, until nothing is; the order in which all of it began."""
        while open_ones := [name for name, done in self.done.items() if not done.done()]:
            await self.end(open_ones[0])
        return self.started


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_smaller_goes_before_what_has_waited_for_less_than_its_patience() -> None:
    works = Works()
    await works.add("first", 1000)
    for index in range(3):
        await works.add(f"large {index}", 1000)
    await works.add("small", 5)
    assert await works.end_all() == ["first", "small", "large 0", "large 1", "large 2"]
    assert [await task for task in works.tasks.values()] == list(works.tasks)


async def test_what_has_waited_for_its_patience_goes_before_what_comes_now(monkeypatch: pytest.MonkeyPatch) -> None:
    works = Works()
    loop = asyncio.get_running_loop()
    await works.add("first", 1000)
    await works.add("large", 1000)
    began_at = loop.time()
    monkeypatch.setattr(loop, "time", lambda: began_at + PATIENCE_S + 1)
    await works.add("small", 5)
    assert await works.end_all() == ["first", "large", "small"]


async def test_too_much_is_refused_and_it_is_the_largest_and_latest() -> None:
    works = Works(max_chars=3000 + 4 * CALL_CHARS)
    for name in ("under way", "waits", "last"):
        await works.add(name, 1000)
    refused = await works.add("too much", 1000)
    expected = rf"{3000 + 3 * CALL_CHARS} characters wait to be done and {1000 + CALL_CHARS} would be added; allowed: "
    with pytest.raises(ResourceExhaustedError, match=expected) as caught:
        await refused
    assert caught.value.retry_after_s is not None
    await works.add("small", 500)
    with pytest.raises(ResourceExhaustedError):
        await works.tasks["last"]
    assert await works.end_all() == ["under way", "small", "waits"]


async def test_who_leaves_while_waiting_frees_its_text_and_its_share() -> None:
    class Text(str):
        """One that can be watched."""

    works = Works(max_chars=2000 + 3 * CALL_CHARS)
    await works.add("under way", 1000)
    text = Text("x" * 1000)
    held = weakref.ref(text)
    leaving = asyncio.create_task(works.turns.run(len(text), partial(works._start, text)))
    del text
    await settle()
    assert held() is not None
    leaving.cancel()
    del leaving
    await settle()
    gc.collect()
    assert held() is None
    await works.add("next", 1000)
    assert await works.end_all() == ["under way", "next"]


async def test_what_is_under_way_counts_until_it_is_over_though_nobody_waits_for_it() -> None:
    works = Works(max_chars=1000 + 2 * CALL_CHARS)
    leaving = await works.add("left", 1000)
    leaving.cancel()
    await settle()
    with pytest.raises(ResourceExhaustedError):
        await (await works.add("refused", 5))
    await works.end("left")
    await works.add("welcome", 5)
    assert await works.end_all() == ["left", "welcome"]


async def test_who_leaves_at_the_moment_of_its_turn_gives_it_to_the_next() -> None:
    works = Works()
    for name in ("under way", "leaves", "next"):
        await works.add(name, 5)
    works.done["under way"].set_result("")
    await asyncio.sleep(0)  # the turn is given
    works.tasks["leaves"].cancel()
    await settle()
    assert works.started == ["under way", "next"]
    await works.end_all()


async def test_work_that_cannot_be_started_or_fails_gives_its_place_back() -> None:
    works = Works()

    def refuse() -> asyncio.Future[str]:
        raise RuntimeError("no thread")

    with pytest.raises(RuntimeError, match="no thread"):
        await works.turns.run(5, refuse)
    failing = await works.add("failing", 5)
    works.done["failing"].set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        await failing
    await works.add("next", 5)
    assert works.started == ["failing", "next"]
    await works.end_all()
