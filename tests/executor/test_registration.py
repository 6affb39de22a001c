"""How often an executor comes back to a scheduler that does not keep it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from executor_svc.lease import LeaseHolder
from executor_svc.registration import Backoff, Registration
from holdback.types import ExecutorInfo
from tests.executor.stub_scheduler import StubScheduler
from tests.scheduler.parts import build_info

pytestmark = pytest.mark.loopback


class OpenStream:
    """In the place of an `Execute` stream that the scheduler opened."""

    def end(self, error: object) -> None:
        pass


@contextlib.asynccontextmanager
async def registering(target: str, holder: LeaseHolder, backoff: Backoff) -> AsyncIterator[None]:
    async def ignore(*_: object) -> None:
        pass

    def make_info(lease: str) -> ExecutorInfo:
        return build_info(lease=lease)

    registration = Registration(target, make_info, holder, ignore, ignore, backoff)
    task = asyncio.create_task(registration.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_pauses_grow_while_the_scheduler_accepts_and_cannot_dial_back(scheduler: StubScheduler) -> None:
    holder, backoff = LeaseHolder(), Backoff(first_s=0.001, longest_s=0.01)
    async with registering(scheduler.target, holder, backoff), asyncio.timeout(60):
        for attempts in range(4):
            registered = await scheduler.registrations.get()
            assert backoff.attempts == attempts
            registered.end.set()


async def test_pauses_start_over_once_the_scheduler_has_dialled_back(scheduler: StubScheduler) -> None:
    holder, backoff = LeaseHolder(), Backoff(first_s=0.001, longest_s=0.01)
    async with registering(scheduler.target, holder, backoff), asyncio.timeout(60):
        for _ in range(3):
            (await scheduler.registrations.get()).end.set()
        registered = await scheduler.registrations.get()
        assert holder.current is not None
        holder.open_execution(holder.current.text, OpenStream())  # type: ignore[arg-type]
        registered.end.set()
        await scheduler.registrations.get()
        assert backoff.attempts == 1
