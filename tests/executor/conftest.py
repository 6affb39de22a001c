"""Fixtures of the executor's tests. The builders are in `builders`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

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


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models take longer with every further thread, and many times as long on a busy machine."""
    import torch  # not every test of the executor needs it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
