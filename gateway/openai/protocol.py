"""HTTP on one connection: uvicorn's protocol, which answers by itself what h11 cannot read; in our shape, and counted.

Such bytes may come at any time. Before a request they are a request that is none. In the body of one they are its
answer, whatever the application was about to say; after its answer has begun they only end the connection.
"""

from __future__ import annotations

import sys
from typing import Any

import h11
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from gateway.openai.errors import plain_error_response
from gateway.openai.observing import ANSWERED_KEY, MAX_HEADER_BYTES, Count

MAX_SHOWN_CHARS = 200
CLOSE = {"Connection": "close"}


class HttpProtocol(H11Protocol):
    """One connection."""

    def __init__(self, count: Count, **arguments: Any) -> None:
        """`count`: is told of each request that is none."""
        super().__init__(**arguments)
        self._count = count

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn where h11 raises."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        if self.cycle is None or self.cycle.response_complete:
            response = _refusal(sys.exception())
            self._count(None, "", response.status_code)
        else:
            response = _body_refusal(sys.exception())
            scope: Any = self.scope
            scope[ANSWERED_KEY] = response.status_code
            self.cycle.disconnected = True  # nothing more is sent, and who reads the body is told
            self.cycle.message_event.set()
        self._send(response)

    def _send(self, response: Response) -> None:
        status = response.status_code
        head = h11.Response(status_code=status, headers=response.raw_headers, reason=STATUS_PHRASES[status])
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _refusal(error: BaseException | None) -> Response:
    """The answer to what is no request."""
    if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
        message = f"the request line and the headers are longer; allowed: at most {MAX_HEADER_BYTES} bytes"
        return plain_error_response(431, message, "headers_too_long", CLOSE)
    return plain_error_response(400, f"this is no request of HTTP/1.1: {_shown(error)}", "invalid_http", CLOSE)


def _body_refusal(error: BaseException | None) -> Response:
    """The answer to a request whose body is cut in no right way."""
    return plain_error_response(400, f"the body is not sent as HTTP/1.1: {_shown(error)}", "invalid_http", CLOSE)


def _shown(error: BaseException | None) -> str:
    """It may quote what the client sent."""
    return str(error)[:MAX_SHOWN_CHARS]
