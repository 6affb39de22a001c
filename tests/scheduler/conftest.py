"""Fixtures of the scheduler service's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from scheduler_svc.config import SchedulerServiceConfig
from scheduler_svc.server import SchedulerServer
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


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[SchedulerServer]]]:
    """Starts schedulers on loopback from settings of the service; they are stopped at the end."""
    servers: list[SchedulerServer] = []

    async def start(**settings: object) -> SchedulerServer:
        server = SchedulerServer(SchedulerServiceConfig.model_validate(settings))
        servers.append(server)
        await server.start()
        return server

    yield start
    for server in servers:
        await server.stop()
