"""What a gateway says of its health, as it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from holdback import rpc
from holdback.health import READINESS


async def watch(health_port: int, service: str = READINESS) -> AsyncIterator[bool]:
    """Every change of one health service, the present state first."""
    async with rpc.create_channel(f"127.0.0.1:{health_port}") as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        replies: grpc.aio.UnaryStreamCall[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
        replies = health_pb2_grpc.HealthStub(channel).Watch(request)
        async for reply in replies:
            yield reply.status == health_pb2.HealthCheckResponse.SERVING


async def wait_for(states: AsyncIterator[bool], expected: bool) -> None:
    async with asyncio.timeout(60):
        async for state in states:
            if state is expected:
                return
