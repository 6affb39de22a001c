"""Health tells the truth about one process, on a port of its own."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from holdback import rpc
from holdback.errors import ConfigError
from holdback.health import LIVENESS, READINESS, HealthServer

pytestmark = pytest.mark.loopback


async def ask(port, service):
    async with rpc.create_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


async def test_a_process_starts_alive_and_unready_and_follows_what_it_is_told():
    server = HealthServer("127.0.0.1", 0)
    port = await server.start()
    try:
        assert await ask(port, LIVENESS) == "SERVING"
        assert await ask(port, READINESS) == "NOT_SERVING"
        await server.set_ready(True)
        assert await ask(port, READINESS) == "SERVING"
        await server.set_ready(False)
        assert await ask(port, READINESS) == "NOT_SERVING"
    finally:
        await server.stop()


async def test_an_unknown_service_is_not_found():
    server = HealthServer("127.0.0.1", 0)
    port = await server.start()
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(port, "another")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    finally:
        await server.stop()


async def test_a_health_port_in_use_is_refused():
    first = HealthServer("127.0.0.1", 0)
    port = await first.start()
    try:
        with pytest.raises(ConfigError, match=f"port is {port}"):
            await HealthServer("127.0.0.1", port).start()
    finally:
        await first.stop()
