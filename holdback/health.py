"""`grpc.health.v1` on a port of its own: the services `readiness` and `liveness`, and those that a process names.

It runs on the process's event loop, so an answer to `liveness` means that the loop turns. `readiness` says what its
process was last told; a process starts unready, and its health server is up before anything that takes time.
"""

from __future__ import annotations

import asyncio

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from holdback import rpc

READINESS = "readiness"
LIVENESS = "liveness"
STARTUP = "startup"
"""Of an executor: whether its model is loaded and warmed up. Until then nobody else asks for signs of life."""
HEALTH = health.SERVICE_NAME
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthServer:
    """One process's health. Start it on the event loop that does the process's work."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._servicer = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Binds and serves; returns the port. Raises ConfigError when the port is in use."""
        self._server = rpc.create_server()
        self.add_to(self._server)
        port = rpc.bind(self._server, self._host, self._port)
        await self._servicer.set(LIVENESS, _SERVING)
        await self._servicer.set(READINESS, _NOT_SERVING)
        await self._server.start()
        return port

    def add_to(self, server: grpc.aio.Server) -> None:
        """The same answers on another port too."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_ready(self, ready: bool) -> None:
        await self.set_service(READINESS, ready)

    async def set_service(self, name: str, ready: bool) -> None:
        """What is said of one service; of a name that was never set it is that it is not known."""
        await self._servicer.set(name, _SERVING if ready else _NOT_SERVING)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            # one turn for watchers to end in; a loop that closes before it would log each of them as a failure
            await asyncio.sleep(0)
