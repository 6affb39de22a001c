"""A question about the scheduler whose bytes are no message: refused in a sentence, and no traceback in the log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from holdback import rpc
from holdback.v1 import scheduler_pb2
from scheduler_svc.server import SchedulerServer
from tests.scheduler.stubs import WAIT_S

pytestmark = pytest.mark.loopback


@pytest.mark.parametrize("method", ["GetLoad", "GetState"])
async def test_bytes_that_are_no_message_are_refused_and_the_next_call_is_answered(
    serve: Callable[..., Awaitable[SchedulerServer]], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve()
    async with rpc.create_channel(f"127.0.0.1:{server.port}") as channel:
        call: Any = channel.unary_unary(f"/holdback.v1.SchedulerService/{method}")
        with pytest.raises(grpc.aio.AioRpcError, match="request is no message of this method") as raised:
            await call(b"\xff\xff", timeout=WAIT_S)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        answer = await call(b"", timeout=WAIT_S)
    kind = getattr(scheduler_pb2, f"{method}Response")
    assert kind.FromString(answer).num_waiting == 0
    assert [record for record in caplog.records if record.exc_info] == []
