"""Fixtures of the scheduler service's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from tests.scheduler.parts import Simulation


@pytest.fixture
async def simulate() -> AsyncIterator[Callable[..., Simulation]]:
    """Makes simulations from settings of the service; their lanes are stopped at the end."""
    made: list[Simulation] = []

    def make(**settings: object) -> Simulation:
        made.append(Simulation(**settings))
        return made[-1]

    yield make
    for simulation in made:
        await simulation.stop()
