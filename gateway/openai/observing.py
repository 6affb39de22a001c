"""What is said and counted of every request: one line in the log, metrics, an id for the client; no error has no shape.

Neither prompts nor answers are in a line, nor is what a client put into a path that is none of ours beyond its length.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote

import structlog
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.openai.body import UnreadResponse
from gateway.openai.errors import CLIENT_CLOSED, error_response, plain_error_response
from holdback.errors import InternalError
from holdback.request_limits import MAX_REQUEST_ID_BYTES

log = structlog.get_logger(__name__)

SCOPE_KEY = "holdback.observation"
ANSWERED_KEY = "holdback.answered"
"""In a scope: the status of the answer that the connection gave by itself, in place of the application's."""

MAX_HEADER_BYTES = 16 * 1024
MAX_LOGGED_PATH_CHARS = 200
QUIET_ROUTES = ("/health/live", "/health/ready", "/metrics")
"""Asked for every few seconds; a line of level `debug` each."""


@dataclass(slots=True)
class Observation:
    """What is known of one request while it is answered.

    Attributes:
        began_at: in seconds of the monotonic clock.
        client_request_id: the header `X-Request-Id`; empty without it.
        request_id: of the generation, once there is one.
        trace_id: of its trace, where it has one.
        caller: name of the API key.
        error: reason of the error that ended it, one within a stream included.
        status: of the response; 499 for a client that left before its end.
    """

    began_at: float = field(default_factory=time.monotonic)
    client_request_id: str = ""
    request_id: str = ""
    trace_id: str = ""
    caller: str = ""
    error: str = ""
    status: int = CLIENT_CLOSED


def observation_of(scope: Scope) -> Observation:
    """Of the request of a scope below `Observing`."""
    observation: Observation = scope[SCOPE_KEY]
    return observation


class Observing:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, count: Count) -> None:
        """`count`: is told route, method and status of each request."""
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        observation = scope[SCOPE_KEY] = Observation()
        response = _Response(observation, send)
        try:
            await self._answer(scope, receive, response)
        except Exception:
            log.exception("request_failed", path=_path(scope))
            observation.error = InternalError.default_reason.value
            if not response.has_begun:
                await error_response(InternalError("the gateway failed; its log says why"))(scope, receive, response)
        finally:
            self._end(scope, observation)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        refusal = _refusal(sum(len(name) + len(value) for name, value in scope["headers"]), given)
        if refusal is None and {b"content-length", b"transfer-encoding"} <= headers.keys():
            refusal = _two_lengths()
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        observation_of(scope).client_request_id = given
        await self._app(scope, receive, send)

    def _end(self, scope: Scope, observation: Observation) -> None:
        route = getattr(scope.get("route"), "path", None)
        observation.status = scope.get(ANSWERED_KEY, observation.status)
        self._count(route, scope["method"], observation.status)
        names = ("request_id", "trace_id", "client_request_id", "caller", "error")
        say = log.debug if route in QUIET_ROUTES else log.info
        say(
            "http_request",
            method=scope["method"][:16],
            path=_path(scope),
            status=observation.status,
            seconds=round(time.monotonic() - observation.began_at, 6),
            **{name: value for name in names if (value := getattr(observation, name))},
        )


class Count(Protocol):
    def __call__(self, route: str | None, method: str, status: int) -> None: ...


class _Response:
    """Sends a response on, notes its status and adds the id by which client and log call the request."""

    def __init__(self, observation: Observation, send: Send) -> None:
        self.has_begun = False
        self._observation = observation
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            self._observation.status = message["status"]
            request_id = self._observation.client_request_id or self._observation.request_id
            if request_id:
                MutableHeaders(scope=message)["x-request-id"] = _for_header(request_id)
        await self._send(message)


def _for_header(request_id: str) -> str:
    """An id of the body may have characters that no header has; those are percent-encoded."""
    return request_id if request_id.isascii() and request_id.isprintable() else quote(request_id)


def _refusal(num_header_bytes: int, request_id: str) -> Response | None:
    """What is wrong with the headers of a request; None if they will do."""
    if num_header_bytes > MAX_HEADER_BYTES:
        message = f"the headers have {num_header_bytes} bytes; allowed: at most {MAX_HEADER_BYTES}"
        return plain_error_response(431, message, "headers_too_long")
    if len(request_id) > MAX_REQUEST_ID_BYTES or not request_id.isascii() or not request_id.isprintable():
        limit = f"at most {MAX_REQUEST_ID_BYTES} printable ASCII characters"
        message = f"the header X-Request-Id has {len(request_id)} characters; allowed: {limit}"
        return plain_error_response(400, message, "invalid_header")
    return None


def _two_lengths() -> Response:
    """A server before this one may go by the other header: what is a body to one would be a request to the other."""
    message = "the headers Content-Length and Transfer-Encoding are both set; allowed: one of them"
    return UnreadResponse(plain_error_response(400, message, "invalid_header", {"Connection": "close"}))


def _path(scope: Scope) -> str:
    return str(scope["path"])[:MAX_LOGGED_PATH_CHARS]
