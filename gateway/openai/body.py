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
from collections import Counter
from dataclasses import dataclass
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.limits import MAX_TOKEN_IDS
from gateway.openai.errors import CLIENT_CLOSED, BodyError

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_JSON_COMMAS = 256 * 1024
"""Of a model of up to 131,072 tokens: decoding is on the event loop, and holds up nobody else for 0.1 s."""

BODY_BYTES_PER_TOKEN = 16
COMMAS_PER_TOKEN = 2
LARGEST_BODY_BYTES = 24 * 1024 * 1024
"""Longer models have longer prompts, up to the longest that any field takes. Their bodies take longer to decode."""

SMALL_BODY_BYTES = 64 * 1024
"""So much of a body always finds room, whoever else holds what."""

MAX_HELD_BYTES = 64 * 1024 * 1024
MAX_BUFFERED_BYTES = 256 * 1024 * 1024
"""Of all larger bodies that are being read: those of one key or, without keys, of one address, and those of all."""

FULL_RETRY_S = 1.0
MAX_JSON_DEPTH = 32
MAX_JSON_CONTAINERS = 16_384
MAX_JSON_STRINGS = 4 * MAX_JSON_CONTAINERS
MAX_JSON_DIGITS = 40
MAX_JSON_FRACTIONS = 16_384
"""Points and exponents of numbers (and letters `e` of booleans): a fraction takes ten times as long as a token id."""

BODY_TIMEOUT_S = 60.0
LINGER_S = 5.0
LINGER_BYTES = 64 * 1024 * 1024

# Possessive, and a string without an end reaches to the end: so that no body makes it go back and try again.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_DIGITS_AS_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_OTHER_THAN_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """How much one body may have.

    Attributes:
        num_bytes: of all.
        num_commas: outside of strings.
    """

    num_bytes: int
    num_commas: int

    @classmethod
    def of(cls, max_model_len: int) -> BodyLimits:
        """For the longest of the served models; 0 while none is known."""
        num_bytes = min(max_model_len * BODY_BYTES_PER_TOKEN, LARGEST_BODY_BYTES)
        num_commas = min(max_model_len * COMMAS_PER_TOKEN, MAX_TOKEN_IDS + MAX_JSON_CONTAINERS)
        return cls(max(MAX_BODY_BYTES, num_bytes), max(MAX_JSON_COMMAS, num_commas))


class BodyReader:
    """Reads the bodies of one server."""

    def __init__(self) -> None:
        self._held = Counter[str]()

    async def read(self, request: Request, holder: str, max_model_len: int) -> dict[str, Any]:
        """The JSON object in a body.

        Args:
            request: with the body.
            holder: whose memory it counts as.
            max_model_len: of the longest served model; 0 while none is known.

        Raises:
            BodyError: it is too long, comes too slowly, or is no such object.
        """
        _check_content_type(request.headers.get("content-type", ""))
        _check_content_encoding(", ".join(request.headers.getlist("content-encoding")))
        limits = BodyLimits.of(max_model_len)
        body = _Body(self._held, holder, limits.num_bytes)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                await body.fill(request)
            return decode_object(bytes(body.content), limits.num_commas)
        except TimeoutError:
            raise BodyError(
                408, f"the body did not come within {BODY_TIMEOUT_S:g} seconds", "request_timeout"
            ) from None
        except ClientDisconnect:
            raise BodyError(CLIENT_CLOSED, "the client went away", "client_closed_request") from None
        finally:
            body.release()


class _Body:
    """One body while it is read."""

    def __init__(self, held: Counter[str], holder: str, max_bytes: int) -> None:
        self.content = bytearray()
        self._held = held
        self._holder = holder
        self._max_bytes = max_bytes
        self._num_counted = 0

    async def fill(self, request: Request) -> None:
        length = request.headers.get("content-length", "0")
        if int(length) > self._max_bytes:  # h11 lets nothing but digits through
            raise _too_long(f"{length} bytes", self._max_bytes)
        async for chunk in request.stream():
            self.content += chunk
            if len(self.content) > self._max_bytes:
                raise _too_long("longer", self._max_bytes)
            if len(self.content) > SMALL_BODY_BYTES:
                self._hold()

    def _hold(self) -> None:
        self._held[self._holder] += len(self.content) - self._num_counted
        self._num_counted = len(self.content)
        if self._held[self._holder] > MAX_HELD_BYTES:
            raise _full("you have too many long bodies under way already")
        if self._held.total() > MAX_BUFFERED_BYTES:
            raise _full("the gateway reads too many long bodies already")

    def release(self) -> None:
        self._held[self._holder] -= self._num_counted
        if not self._held[self._holder]:
            del self._held[self._holder]


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


def decode_object(body: bytes, max_commas: int = MAX_JSON_COMMAS) -> dict[str, Any]:
    """A JSON object of bounded depth and width, with each key once, of characters that UTF-8 can write.

    Raises:
        BodyError: the body is anything else.
    """
    bare, num_strings = _STRING.subn(b"", body, MAX_JSON_STRINGS + 1)
    if num_strings > MAX_JSON_STRINGS:
        raise _no_json(f"more than {MAX_JSON_STRINGS} strings; allowed: at most that many")
    _check_structure(bare, max_commas)
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


def _check_content_encoding(value: str) -> None:
    if value.strip().lower() not in ("", "identity"):
        message = f"Content-Encoding is {_shorten(value)!r}; allowed: none, a body is sent as it is"
        raise BodyError(415, message, "unsupported_media_type")


def _check_structure(bare: bytes, max_commas: int) -> None:
    """`bare`: the document without its strings."""
    brackets = bare.translate(None, _OTHER_THAN_BRACKETS)
    num_containers = len(brackets) // 2
    if num_containers > MAX_JSON_CONTAINERS:
        raise _no_json(f"{num_containers} arrays and objects; allowed: at most {MAX_JSON_CONTAINERS}")
    depth = max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0)
    if depth > MAX_JSON_DEPTH:
        raise _no_json(f"{depth} levels; allowed: at most {MAX_JSON_DEPTH}")
    num_commas = bare.count(b",")
    if num_commas > max_commas:
        raise _no_json(f"{num_commas} commas; allowed: at most {max_commas}")
    num_fractions = sum(map(bare.count, (b".", b"e", b"E")))
    if num_fractions > MAX_JSON_FRACTIONS:
        raise _no_json(f"{num_fractions} fractions and exponents; allowed: at most {MAX_JSON_FRACTIONS}")
    # To convert a number costs the square of its length.
    if b"0" * (MAX_JSON_DIGITS + 1) in bare.translate(_DIGITS_AS_ZEROS):
        raise _no_json(f"a number has more than {MAX_JSON_DIGITS} digits in a row; allowed: at most that many")


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


def _too_long(size: str, max_bytes: int) -> BodyError:
    return BodyError(413, f"the body is {size}; allowed: at most {max_bytes} bytes", "body_too_long")


def _full(why: str) -> BodyError:
    return BodyError(503, f"{why}; try again", "bodies_full", retry_after_s=FULL_RETRY_S)


def _no_json(why: str) -> BodyError:
    return BodyError(400, f"the body is not JSON as it is allowed here: {why}", "invalid_json")


def _shorten(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."
