"""Fixtures of the executor's tests. The builders are in `builders`."""

from __future__ import annotations

import pytest

from tests.executor.builders import Steps


@pytest.fixture
def steps() -> Steps:
    """A scheduler by hand, at step 0."""
    return Steps()
