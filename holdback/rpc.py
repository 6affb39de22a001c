"""The only place that makes gRPC servers and channels, and that turns exceptions into statuses and back.

Every peer has the same message limit and matching keepalive, no channel uses an HTTP proxy from the environment, and a
port belongs to one process: a second server on it is refused, whatever it serves.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
from collections.abc import Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from holdback.errors import (
    AlreadyExistsError,
    ConfigError,
    DeadlineExceededError,
    ErrorReason,
    FailedPreconditionError,
    HoldbackError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    RequestAbortedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from holdback.tls import NO_TLS, Tls
from holdback.v1 import errors_pb2

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""One limit for every server and channel, save where a server takes less; no legal message is longer."""

MAX_PENDING_CALLS = 100_000
ERROR_DOMAIN = "holdback"
MAX_STATUS_MESSAGE_BYTES = 1000  # statuses travel as HTTP/2 headers, which peers bound at 8 KiB
STATUS_DETAILS_KEY = "grpc-status-details-bin"
LOST_STATUS = "Internal error from Core"
"""What grpc.aio says, as INTERNAL, of a stream that ended while a message was written to it. It keeps no reason."""

STATUS_CODES: dict[type[HoldbackError], grpc.StatusCode] = {
    UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    FailedPreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    ResourceExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    RequestAbortedError: grpc.StatusCode.ABORTED,
    InternalError: grpc.StatusCode.INTERNAL,
}
_CLASSES: dict[int, type[HoldbackError]] = {
    code.value[0]: cls for cls, code in STATUS_CODES.items() if cls is not ConfigError
} | {grpc.StatusCode.CANCELLED.value[0]: RequestAbortedError}
_CODES_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}

_COMMON_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Unless it is shorter, gRPC waits this long, 60 s by default, for the answer to its keepalive ping.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    # gRPC itself would drop calls that arrive faster than Python takes them, from about a thousand on, as CANCELLED.
    # Who has too many is for the scheduler's queue limits to say.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
]
_CHANNEL_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    # A peer that restarts on the same address is found within seconds, and one channel's back-off is not another's.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
_ROUND_ROBIN = [("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]}))]


def create_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    *,
    max_connection_age_s: float | None = None,
    max_receive_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Server:
    """A server without ports or services yet.

    Args:
        interceptors: asked for every call, the first one first.
        max_connection_age_s: after which, give or take a tenth, a connection takes no new calls, so that its client
            connects anew and finds new servers; calls that run on it go on. None: connections do not end by age.
        max_receive_bytes: a client that sends a longer message has its call ended with RESOURCE_EXHAUSTED.
    """
    options = [*(dict(_SERVER_OPTIONS) | {"grpc.max_receive_message_length": max_receive_bytes}).items()]
    if max_connection_age_s is not None:
        # The time for calls that run (`grpc.max_connection_age_grace_ms`) is without limit unless it is set.
        options.append(("grpc.max_connection_age_ms", max(1, int(max_connection_age_s * 1000))))
    return grpc.aio.server(interceptors=list(interceptors), options=options)


def format_address(host: str, port: int) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(server: grpc.aio.Server, host: str, port: int, tls: Tls = NO_TLS) -> int:
    """Gives a server its port and returns it; 0 takes a free one.

    Raises:
        ConfigError: the address cannot be bound, usually because another process has it; or a file of `tls` is none.
    """
    credentials, address = tls.server_credentials(), format_address(host, port)
    try:
        _try_to_bind(host, port)  # gRPC would write its own line to the log, and say no reason
        bound: int = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "in use by another process?"
        raise ConfigError(f"port is {port}, which cannot be bound on {host}: {reason}") from error
    return bound


def _try_to_bind(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def create_channel(target: str, tls: Tls = NO_TLS, *, max_receive_bytes: int = MAX_MESSAGE_BYTES) -> grpc.aio.Channel:
    """A channel to `host:port` or any gRPC target. Raises ConfigError when a file of `tls` is none.

    Args:
        target: of `dns:`, it spreads calls over all addresses of the name (`round_robin`).
        max_receive_bytes: a peer that sends a longer message ends its call with RESOURCE_EXHAUSTED.
    """
    credentials = tls.channel_credentials()
    options = [*(dict(_CHANNEL_OPTIONS) | {"grpc.max_receive_message_length": max_receive_bytes}).items()]
    if target.startswith("dns:"):
        options += _ROUND_ROBIN
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(target, credentials, options=options)


def peer_ip(peer: str) -> str:
    """The address of `ServicerContext.peer()` as a literal IP, an IPv4-mapped IPv6 address unmapped.

    Raises:
        FailedPreconditionError: the peer is not on an IP network.
    """
    kind, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0].replace("%5B", "[").replace("%5D", "]").strip("[]")
    try:
        if kind not in ("ipv4", "ipv6"):
            raise ValueError(kind)
        address = ipaddress.ip_address(host.replace("%25", "%"))
    except ValueError:
        raise FailedPreconditionError(
            f"peer is {peer!r}; allowed: an IPv4 or IPv6 peer", reason=ErrorReason.ADDRESS_NOT_ALLOWED
        ) from None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def encode_status(error: HoldbackError) -> status_pb2.Status:
    """The google.rpc.Status of an exception: ErrorInfo always, BadRequest and RetryInfo where they apply."""
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason.value, domain=ERROR_DOMAIN)]
    if isinstance(error, InvalidArgumentError):
        details[0].metadata.update({"field": error.field, "value": error.value, "limit": error.limit})
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=_shorten(error.message))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, ResourceExhaustedError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=STATUS_CODES[type(error)].value[0], message=_shorten(error.message))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: HoldbackError) -> NoReturn:
    """Ends a call with the status of an exception."""
    status = encode_status(error)
    await context.abort(
        _CODES_BY_NUMBER[status.code], status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),)
    )
    raise AssertionError("context.abort returned")


def error_from_rpc(failure: grpc.aio.AioRpcError) -> HoldbackError:
    """The exception that the other side meant. A status without our details becomes the class of its code."""
    if failure.code() is grpc.StatusCode.INTERNAL and failure.details() == LOST_STATUS:
        return UnavailableError("the stream ended while a message was written to it, and its reason was lost")
    number: int = failure.code().value[0]
    message = failure.details() or failure.code().name
    for key, value in failure.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):  # details of somebody in between, who writes them otherwise
                return _decode_status(status_pb2.Status.FromString(value), message)
    cls = _CLASSES.get(number)
    if cls is None:
        return InternalError(f"{failure.code().name}: {message}")
    return cls(message)


def error_of_server(failure: grpc.aio.AioRpcError, server: str, target: str, tls: Tls) -> HoldbackError:
    """As `error_from_rpc`, for an address that somebody gave; says what is wrong with that where it can be told.

    Args:
        failure: of a call to it.
        server: what should be there, `gateway` or `scheduler`.
        target: the address.
        tls: with which it was dialled.
    """
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
        return ConfigError(
            f"{target} is no {server}'s port; allowed: the one of its service, not of its health or metrics"
        )
    error, hint = error_from_rpc(failure), _tls_hint(failure.details() or "", tls)
    return error if hint is None else UnavailableError(f"{error.message}; {hint}", reason=error.reason)


def _tls_hint(details: str, tls: Tls) -> str | None:
    """What gRPC's core says when it could not connect, in terms of our settings."""
    _, _, last_error = details.partition("last error: ")
    if "WRONG_VERSION_NUMBER" in last_error:
        return "it speaks no TLS there, and tls_ca is set"
    if "Socket closed" not in last_error and "Connection reset" not in last_error:
        return None
    if tls.ca is None:
        return "it may want TLS, and tls_ca is not set"
    return None if tls.cert is not None else "it may want a certificate, and tls_cert is not set"


def _decode_status(status: status_pb2.Status, message: str) -> HoldbackError:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            detail.Unpack(retry)
    return _build(
        status.code,
        info.reason,
        message,
        dict(info.metadata),
        retry.retry_delay.ToMilliseconds() / 1000 if retry.HasField("retry_delay") else None,
    )


def encode_error(error: HoldbackError) -> errors_pb2.RequestError:
    """The error of one request on a stream that many share."""
    message = errors_pb2.RequestError(
        code=STATUS_CODES[type(error)].value[0],
        reason=errors_pb2.ErrorReason.Value(f"ERROR_REASON_{error.reason.value}"),
        message=error.message,
    )
    if isinstance(error, InvalidArgumentError):
        message.field, message.value, message.limit = error.field, error.value, error.limit
    if isinstance(error, ResourceExhaustedError):
        message.retry_delay_ms = int(error.retry_after_s * 1000)
    return message


def decode_error(message: errors_pb2.RequestError) -> HoldbackError:
    """The inverse of `encode_error`. What a newer peer names and this side does not know becomes INTERNAL."""
    known = message.reason in errors_pb2.ErrorReason.values()
    reason = errors_pb2.ErrorReason.Name(message.reason).removeprefix("ERROR_REASON_") if known else "INTERNAL"
    fields = {"field": message.field, "value": message.value, "limit": message.limit}
    retry_after_s = message.retry_delay_ms / 1000 if message.HasField("retry_delay_ms") else None
    return _build(message.code, reason, message.message, fields, retry_after_s)


def _build(
    code: int, reason_name: str, message: str, fields: dict[str, str], retry_after_s: float | None
) -> HoldbackError:
    reason = ErrorReason(reason_name) if reason_name in ErrorReason.__members__ else ErrorReason.INTERNAL
    cls = _CLASSES.get(code, InternalError)
    if cls is InvalidArgumentError:
        names = {name: fields.get(name, "") for name in ("field", "value", "limit")}
        return InvalidArgumentError(message, reason=reason, **names)
    if cls is ResourceExhaustedError:
        return ResourceExhaustedError(message, reason=reason, retry_after_s=retry_after_s or 1.0)
    return cls(message, reason=reason)


def _shorten(message: str) -> str:
    content = message.encode()
    if len(content) <= MAX_STATUS_MESSAGE_BYTES:
        return message
    return content[: MAX_STATUS_MESSAGE_BYTES - 3].decode(errors="ignore") + "..."
