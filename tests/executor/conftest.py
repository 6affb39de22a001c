"""Fixtures of the executor's tests. The builders are in `builders`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.executor.builders import Steps
from tests.executor.stub_scheduler import StubScheduler


@pytest.fixture
def steps() -> Steps:
    """A scheduler by hand, at step 0."""
    return Steps()


@pytest.fixture
async def scheduler() -> AsyncIterator[StubScheduler]:
    async with StubScheduler() as stub:
        yield stub
