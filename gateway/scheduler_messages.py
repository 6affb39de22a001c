"""What the messages of a scheduler say, checked."""

from __future__ import annotations

from gateway.submission import Ended
from holdback import codec, rpc
from holdback.errors import ErrorReason, FailedPreconditionError, InternalError, InvalidArgumentError
from holdback.types import PROTOCOL_VERSION, FinishReason
from holdback.v1 import scheduler_pb2


def check_accepted(response: scheduler_pb2.ConnectResponse | None) -> None:
    """The first message of a stream. Raises InvalidArgumentError or FailedPreconditionError."""
    kind = None if response is None else response.WhichOneof("response")
    if response is None or kind != "accepted":
        raise InvalidArgumentError.of("response", kind or "not set", "accepted, first")
    major = response.accepted.protocol_version.major
    if major != PROTOCOL_VERSION[0]:
        raise FailedPreconditionError(
            f"the scheduler speaks protocol {major}; allowed: {PROTOCOL_VERSION[0]}, that of this gateway",
            reason=ErrorReason.PROTOCOL_MISMATCH,
        )


def decode_ended(message: scheduler_pb2.RequestEnded) -> Ended:
    """How a request ended; one that ended with an error has one."""
    reason = codec.decode_finish_reason(message.finish_reason)
    error = rpc.decode_error(message.error) if message.HasField("error") else None
    if error is None and reason is FinishReason.ERROR:
        error = InternalError("the scheduler ended the request with an error that it did not name")
    return Ended(reason, message.stop_token_id if message.HasField("stop_token_id") else None, error)
