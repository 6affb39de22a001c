"""Work that another thread waits for ends when that thread is interrupted, at whatever moment."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator

import pytest

from holdback.background import LoopThread
from holdback.errors import RequestAbortedError


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.stop()


class Work:
    """Begins, and ends only when it is cancelled."""

    def __init__(self) -> None:
        self.begun, self.ended = threading.Event(), threading.Event()

    async def run(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


def interrupt_at(thread: LoopThread, monkeypatch: pytest.MonkeyPatch, moment: Callable[[], object] | None) -> None:
    """Has the first hand-over interrupted: before it if there is no moment, else after it, once that has come."""
    loop, is_first = thread._loop, True
    hand_over = loop.call_soon_threadsafe

    def interrupted(callback: Callable[[], object]) -> object:
        nonlocal is_first
        if not is_first:
            return hand_over(callback)
        is_first = False
        if moment is not None:
            hand_over(callback)
            moment()
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)


def test_an_interrupt_right_after_the_hand_over_ends_the_work(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work()
    interrupt_at(thread, monkeypatch, lambda: work.begun.wait(60))
    with pytest.raises(KeyboardInterrupt):
        thread.run(work.run())
    assert work.ended.wait(60)


def test_what_was_interrupted_before_it_began_never_begins(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    work, is_free = Work(), threading.Event()
    thread.call_soon(lambda: is_free.wait(60))
    interrupt_at(thread, monkeypatch, lambda: None)
    with pytest.raises(KeyboardInterrupt):
        thread.run(work.run())
    monkeypatch.undo()
    is_free.set()
    assert thread.run(asyncio.sleep(0, "next")) == "next"
    assert not work.begun.is_set()


def test_what_was_never_handed_over_is_closed(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()
    interrupt_at(thread, monkeypatch, None)
    coroutine = work.run()
    with pytest.raises(KeyboardInterrupt):
        thread.run(coroutine)
    monkeypatch.undo()
    assert thread.run(asyncio.sleep(0, "next")) == "next"
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_results_and_errors_come_back_and_work_on_a_stopped_loop_is_refused(thread: LoopThread) -> None:
    async def fail() -> None:
        raise ValueError("no")

    assert thread.run(asyncio.sleep(0, "result")) == "result"
    with pytest.raises(ValueError, match="no"):
        thread.run(fail())
    thread.stop()
    with pytest.raises(RequestAbortedError, match="the client is closed"):
        thread.run(asyncio.sleep(0))


def test_a_stop_ends_what_another_thread_waits_for(thread: LoopThread) -> None:
    work, raised = Work(), []

    def wait() -> None:
        try:
            thread.run(work.run())
        except RequestAbortedError as error:
            raised.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert work.begun.wait(60)
    thread.stop()
    waiting.join(60)
    assert raised == ["the client was closed"]
    assert work.ended.is_set()
