"""The `Execute` stream of one executor, as a lane uses it: steps go out, outputs, drains and the end come in."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from holdback import codec, rpc
from holdback.errors import ErrorReason, InternalError, UnavailableError
from holdback.tls import NO_TLS, Tls
from holdback.types import ExecutorInfo, SchedulerOutput
from holdback.v1 import executor_pb2
from scheduler_svc.lane import Lane
from scheduler_svc.output_check import check_message, max_message_bytes
from scheduler_svc.streams import check_protocol, protocol_version

EXECUTE = f"/{executor_pb2.DESCRIPTOR.services_by_name['ExecutorService'].full_name}/Execute"


class StepStream:
    """One `Execute` call. Every failure comes as a HoldbackError."""

    def __init__(self, target: str, info: ExecutorInfo, tls: Tls = NO_TLS) -> None:
        self._target = target
        self._max_message_bytes = max_message_bytes(info)
        self._channel = rpc.create_channel(target, tls, max_receive_bytes=self._max_message_bytes)
        self._call = self._channel.stream_stream(
            EXECUTE, executor_pb2.ExecuteRequest.SerializeToString, _decode_or_error
        )()
        self._responses = aiter(self._call)
        self._encoder = codec.StepEncoder()

    async def open(self, lease: str, timeout_s: float) -> None:
        """Presents the lease and waits until the executor accepts it."""
        opening = executor_pb2.OpenExecution(lease=lease, protocol_version=protocol_version())
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(executor_pb2.ExecuteRequest(open=opening))
                response = await self._read()
        except TimeoutError:
            raise UnavailableError(
                f"the executor did not accept Execute on {self._target} in {timeout_s:g} s",
                reason=ErrorReason.PEER_SILENT,
            ) from None
        if response is None or response.WhichOneof("response") != "accepted":
            raise InternalError("the executor's first message is not `accepted`")
        check_protocol("executor", response.accepted.protocol_version)

    async def send(self, output: SchedulerOutput) -> None:
        await self._write(executor_pb2.ExecuteRequest(step=self._encoder.encode(output)))

    async def receive_into(self, lane: Lane) -> None:
        """Passes on what arrives until the stream ends; the end is a failure of the lane unless it was drained."""
        try:
            while (response := await self._read()) is not None:
                self._pass_on(response, lane)
            lane.fail(UnavailableError("the executor ended its Execute stream"))
        except Exception as error:  # whatever it is, a lane that nobody tells of it would wait for nothing
            lane.fail(error)

    async def close(self) -> None:
        """Ends the call, whatever its state, and the connection."""
        self._call.cancel()
        await self._channel.close()

    def _pass_on(self, response: executor_pb2.ExecuteResponse, lane: Lane) -> None:
        kind = response.WhichOneof("response")
        if kind == "output":
            check_message(response.output, lane.info, lane.core.sampling_rows(response.output.step))
            lane.receive(codec.decode_runner_output(response.output))
        elif kind == "draining":
            lane.drain(response.draining.reason)
        elif kind == "failed":
            raise codec.decode_execution_failed(response.failed)
        elif kind == "accepted":
            raise InternalError("the executor accepted Execute twice")
        # Anything else is of a newer executor, and means nothing here.

    async def _write(self, request: executor_pb2.ExecuteRequest) -> None:
        """A stream that has ended takes nothing. Why it ended, and the results before that, are for the reader."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(request)

    async def _read(self) -> executor_pb2.ExecuteResponse | None:
        """None at the end of the stream."""
        try:
            # Not `read`, which returns nothing more of what has arrived once a write has failed.
            response = await anext(self._responses, None)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # says gRPC itself, of what is too long to take in
                limit = f"allowed: {self._max_message_bytes} bytes, for the rows that it has"
                raise InternalError(f"the executor sent too long a message; {limit}") from error
            raise rpc.error_from_rpc(error) from error
        if isinstance(response, DecodeError):
            raise InternalError(f"a message of the executor cannot be read: {response}")
        return response


def _decode_or_error(data: bytes) -> executor_pb2.ExecuteResponse | DecodeError:
    """gRPC would log what cannot be read with a traceback, and hand on nothing, as it does at the end of a stream."""
    try:
        return executor_pb2.ExecuteResponse.FromString(data)
    except DecodeError as error:
        return error
