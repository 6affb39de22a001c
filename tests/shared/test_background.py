"""Work that another thread waits for ends when that thread is interrupted, at whatever moment, or stops the loop."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from holdback.background import LINGER_S, LoopThread
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
    hand_over = loop.call_soon

    def interrupted(callback: Callable[[], object]) -> bool:
        nonlocal is_first
        if not is_first:
            return hand_over(callback)
        is_first = False
        if moment is not None:
            hand_over(callback)
            moment()
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "call_soon", interrupted)


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


def test_a_loop_whose_work_was_cut_hears_what_others_still_say_of_it(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, is_heard = Work(), threading.Event()
    interrupt_at(thread, monkeypatch, lambda: work.begun.wait(60))
    with pytest.raises(KeyboardInterrupt):
        thread.run(work.run())
    assert work.ended.wait(60)
    thread.call_soon(lambda: asyncio.get_running_loop().call_later(LINGER_S / 2, is_heard.set))
    thread.stop()
    assert is_heard.is_set()


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
    # The first where it waits already, the second where it had only handed its work over.
    assert raised in (["the client was closed"], ["the client is closed"])
    assert work.ended.is_set()


class Interrupter:
    """Calls a function before one line of what is called next, as a signal handler may be: in the same thread."""

    def __init__(self, number: int, function: Callable[[], object]) -> None:
        self._lines_left = number
        self._function = function
        self.place = ""

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._lines_left -= 1
            if self._lines_left == 0:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                self._function()
        return self.trace


def run_interrupted(interrupter: Interrupter, function: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        sys.settrace(interrupter.trace)
        function()
        sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)  # where it hangs, the test fails and goes on
    thread.start()
    return thread


@pytest.mark.parametrize("interrupted", ["run", "call_soon", "stop"])
def test_a_signal_handler_may_stop_it_whatever_it_interrupts(interrupted: str) -> None:
    def use() -> None:
        work = {
            "run": lambda: thread.run(asyncio.sleep(0, "result")),
            "call_soon": lambda: thread.call_soon(int),
            "stop": thread.stop,
        }
        try:
            results.append(work[interrupted]())
        except RequestAbortedError as error:
            results.append(error.message)

    results: list[object] = []
    for number in itertools.count(1):
        thread = LoopThread("test")
        interrupter = Interrupter(number, thread.stop)
        user = run_interrupted(interrupter, use)
        user.join(5)
        assert not user.is_alive(), f"stopped at {interrupter.place}, it hangs"
        assert not interrupter.place or not thread._loop._thread.is_alive(), interrupter.place
        thread.stop()
        if not interrupter.place:
            break
    assert len(results) == number > 5
    allowed = {"result", "the client is closed", "the client was closed"} if interrupted == "run" else {None}
    assert set(results) <= allowed


def test_a_stop_that_is_interrupted_can_be_called_again(thread: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(thread, monkeypatch, None)
    with pytest.raises(KeyboardInterrupt):
        thread.stop()
    assert thread._loop._thread.is_alive()
    thread.stop()
    assert not thread._loop._thread.is_alive()
