"""Rendered once per run of the tests."""

from __future__ import annotations

import pytest

from tests.chart.rendering import EVERYTHING, SMALL, Rendered, render


@pytest.fixture(scope="session")
def small() -> Rendered:
    return render(SMALL)


@pytest.fixture(scope="session")
def everything() -> Rendered:
    return render(EVERYTHING)
