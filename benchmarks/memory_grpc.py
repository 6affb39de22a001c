"""The gRPC library replaced by memory, so that a service can be timed from bytes in to bytes out without a socket.

Inside `in_memory(...)`, what `holdback.rpc` makes are `MemoryServer` and `MemoryChannel`. Services, streams, messages,
serializers and the event loop are the real ones. The other end of a stream is the benchmark: it gives bytes with
`deliver` and is handed bytes through a callback, within the `write` of the product.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from unittest import mock

import grpc
import grpc.aio

from holdback import rpc

OnWrite = Callable[[bytes], None]


class MemoryStream:
    """The product's end of one stream: what `grpc.aio` calls a call or a context."""

    def __init__(
        self, serialize: Callable[[Any], bytes], deserialize: Callable[[bytes], Any], on_write: OnWrite
    ) -> None:
        self.on_write = on_write
        self._serialize = serialize
        self._deserialize = deserialize
        self._received: deque[bytes | None] = deque()
        self._reader: asyncio.Future[None] | None = None

    def deliver(self, data: bytes | None) -> None:
        """The other end sends a message; None ends its side."""
        self._received.append(data)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def read(self) -> Any:
        while not self._received:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        data = self._received.popleft()
        return grpc.aio.EOF if data is None else self._deserialize(data)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def write(self, message: Any) -> None:
        self.on_write(self._serialize(message))

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def cancel(self) -> bool:
        self.deliver(None)
        return True

    async def abort(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> NoReturn:
        raise RuntimeError(f"a stream was aborted: {code.name}: {details}")


class MemoryServer:
    """Takes the services that are added to it; `open` starts a call of one of them."""

    def __init__(self) -> None:
        self._methods: dict[str, Any] = {}
        self._calls: set[asyncio.Task[None]] = set()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """What `add_registered_method_handlers` says again."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self._methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_insecure_port(self, address: str) -> int:
        return 1

    async def start(self) -> None:
        """There is nothing to listen on."""

    async def stop(self, grace: float | None) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def has(self, method: str) -> bool:
        return method in self._methods

    def open(self, method: str, on_write: OnWrite) -> MemoryStream:
        """Starts a bidirectional call; `method` is its path."""
        handler = self._methods[method]
        stream = MemoryStream(handler.response_serializer, handler.request_deserializer, on_write)
        self._calls.add(asyncio.ensure_future(handler.stream_stream(stream, stream)))
        return stream


class MemoryChannel:
    """A channel whose calls end in the benchmark: `on_open` is told of each."""

    def __init__(self, on_open: Callable[[MemoryStream], None]) -> None:
        self._on_open = on_open

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Callable[[], MemoryStream]:
        def call() -> MemoryStream:
            stream = MemoryStream(request_serializer, response_deserializer, lambda data: None)
            self._on_open(stream)
            return stream

        return call

    async def close(self) -> None:
        """There is no connection."""


@contextmanager
def in_memory(on_open: Callable[[MemoryStream], None]) -> Iterator[list[MemoryServer]]:
    """Makes `holdback.rpc` work in memory; yields the servers that are made meanwhile."""
    servers: list[MemoryServer] = []

    def create_server(*args: object, **options: object) -> MemoryServer:
        servers.append(MemoryServer())
        return servers[-1]

    def create_channel(*args: object, **options: object) -> MemoryChannel:
        return MemoryChannel(on_open)

    with mock.patch.multiple(rpc, create_server=create_server, create_channel=create_channel):
        yield servers
