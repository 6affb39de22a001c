"""Bodies of requests: read no further than their limit, and decoded as JSON that means one thing only.

The strings of a body are skipped by one regular expression, so what is counted are its own brackets and commas: how
deep and how wide a document is, is known before the first object of it is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.limits import MAX_TOKEN_IDS
from gateway.openai.errors import CLIENT_CLOSED, BodyError

MAX_BODY_BYTES = 24 * 1024 * 1024
"""More than the longest prompt needs, as text with escapes or as token ids."""

MAX_BUFFERED_BYTES = 256 * 1024 * 1024
"""Of all bodies together that are being read."""

MAX_JSON_DEPTH = 32
MAX_JSON_CONTAINERS = 65_536
MAX_JSON_STRINGS = 4 * MAX_JSON_CONTAINERS
MAX_JSON_COMMAS = MAX_TOKEN_IDS + MAX_JSON_CONTAINERS
BODY_TIMEOUT_S = 60.0
LINGER_S = 5.0
LINGER_BYTES = 64 * 1024 * 1024

# Possessive, and a string without an end reaches to the end: so that no body makes it go back and try again.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_OTHER_THAN_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class BodyReader:
    """Reads the bodies of one server."""

    def __init__(self) -> None:
        self._num_buffered_bytes = 0

    async def read(self, request: Request) -> dict[str, Any]:
        """The JSON object in a body.

        Raises:
            BodyError: it is too long, comes too slowly, or is no such object.
        """
        _check_content_type(request.headers.get("content-type", ""))
        with self._buffering() as buffer:
            try:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    await self._fill(buffer, request)
            except TimeoutError:
                raise BodyError(
                    408, f"the body did not come within {BODY_TIMEOUT_S:g} seconds", "request_timeout"
                ) from None
            except ClientDisconnect:
                raise BodyError(CLIENT_CLOSED, "the client went away", "client_closed_request") from None
            return decode_object(bytes(buffer))

    async def _fill(self, buffer: bytearray, request: Request) -> None:
        length = request.headers.get("content-length", "0")
        if int(length) > MAX_BODY_BYTES:  # h11 lets nothing but digits through
            raise _too_long(f"{length} bytes")
        async for chunk in request.stream():
            self._num_buffered_bytes += len(chunk)
            buffer += chunk
            if len(buffer) > MAX_BODY_BYTES:
                raise _too_long("longer")
            if self._num_buffered_bytes > MAX_BUFFERED_BYTES:
                raise BodyError(503, "the gateway reads too many long bodies already; try again", "bodies_full")

    @contextlib.contextmanager
    def _buffering(self) -> Iterator[bytearray]:
        buffer = bytearray()
        try:
            yield buffer
        finally:
            self._num_buffered_bytes -= len(buffer)


class UnreadResponse(Response):
    """A response to a body that was not read to its end, before its connection is closed.

    Most clients send all of a body before they look at the response, and a connection that is closed while they do
    takes it away from them. So the rest is read and dropped for a while.
    """

    def __init__(self, response: Response) -> None:
        super().__init__(response.body, response.status_code, dict(response.headers))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await _drop(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drop(receive: Receive) -> None:
    num_dropped = 0
    while num_dropped < LINGER_BYTES:
        message = await receive()
        num_dropped += len(message.get("body", b""))
        if not message.get("more_body"):
            return


def decode_object(body: bytes) -> dict[str, Any]:
    """A JSON object of bounded depth and width, with each key once, of characters that UTF-8 can write.

    Raises:
        BodyError: the body is anything else.
    """
    bare, num_strings = _STRING.subn(b"", body, MAX_JSON_STRINGS + 1)
    if num_strings > MAX_JSON_STRINGS:
        raise _no_json(f"more than {MAX_JSON_STRINGS} strings; allowed: at most that many")
    _check_structure(bare)
    try:
        decoded = json.loads(body.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _no_json(f"byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise _no_json(_shorten(str(error))) from None
    if not isinstance(decoded, dict):
        raise _no_json("an object is needed")
    if _SURROGATE.search(body) is not None:
        _check_surrogates(decoded)
    return decoded


def _check_content_type(value: str) -> None:
    media_type, _, parameters = value.partition(";")
    if media_type.strip().lower() != "application/json":
        shown = repr(_shorten(value)) if value else "not set"
        raise BodyError(415, f"Content-Type is {shown}; allowed: application/json", "unsupported_media_type")
    if "charset" in parameters.lower() and "utf-8" not in parameters.lower():
        raise BodyError(
            415, f"Content-Type is {_shorten(value)!r}; allowed: application/json in UTF-8", "unsupported_media_type"
        )


def _check_structure(bare: bytes) -> None:
    """`bare`: the document without its strings."""
    brackets = bare.translate(None, _OTHER_THAN_BRACKETS)
    num_containers = len(brackets) // 2
    if num_containers > MAX_JSON_CONTAINERS:
        raise _no_json(f"{num_containers} arrays and objects; allowed: at most {MAX_JSON_CONTAINERS}")
    depth = max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0)
    if depth > MAX_JSON_DEPTH:
        raise _no_json(f"{depth} levels; allowed: at most {MAX_JSON_DEPTH}")
    num_commas = bare.count(b",")
    if num_commas > MAX_JSON_COMMAS:
        raise _no_json(f"{num_commas} commas; allowed: at most {MAX_JSON_COMMAS}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {_shorten(twice)!r} stands twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _check_surrogates(decoded: dict[str, Any]) -> None:
    try:
        json.dumps(decoded, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _no_json("half of a surrogate pair stands alone") from None


def _too_long(size: str) -> BodyError:
    return BodyError(413, f"the body is {size}; allowed: at most {MAX_BODY_BYTES} bytes", "body_too_long")


def _no_json(why: str) -> BodyError:
    return BodyError(400, f"the body is not JSON as it is allowed here: {why}", "invalid_json")


def _shorten(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."
