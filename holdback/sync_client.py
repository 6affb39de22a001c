"""The SDK without `async`: each method of `Client` is that of `AsyncClient`, run on an event loop in the background.

with Client("127.0.0.1:50051") as client:
    print(client.chat([{"role": "user", "content": "Hello!"}]).text)
    for piece in client.stream("The capital of France is"):
        print(piece.text, end="")
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypedDict, TypeVar, Unpack

from holdback.answers import Piece
from holdback.background import LoopThread
from holdback.client import AsyncClient
from holdback.streaming import GenerationStream
from holdback.tls import Tls
from holdback.types import Usage

P = ParamSpec("P")
T = TypeVar("T")


class ClientSettings(TypedDict, total=False):
    """Settings of a client, as `AsyncClient` explains them."""

    timeout_s: float | None
    tls: Tls
    api_key: str | None
    insecure_api_key: bool
    max_retries: int
    max_resumes: int


def _blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Client, P], T]:
    """A coroutine method of `AsyncClient` as a method of `Client` that returns its result."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.run(method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], GenerationStream],
) -> Callable[Concatenate[Client, P], SyncGenerationStream]:
    """A method of `AsyncClient` that returns a stream as a method of `Client` that returns a plain iterator."""

    @functools.wraps(method)
    def call(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> SyncGenerationStream:
        async def start() -> GenerationStream:
            return method(self._client, *args, **kwargs)

        return SyncGenerationStream(self._thread, self._thread.run(start()))

    return call


class Client:
    """`AsyncClient` for plain threads, any number of them at once. Use it as a context manager, or `close` it.

    Each client has one thread in the background; it ends with `close`, when nothing refers to the client any more, and
    when the interpreter exits. Do not call it on an event loop: that would stand still. In a process that is forked
    from this one, every call raises RequestAbortedError.
    """

    def __init__(self, address: str | Sequence[str], **settings: Unpack[ClientSettings]) -> None:
        """Takes what `AsyncClient` takes, and raises what it raises."""
        self._thread = LoopThread("holdback client")
        try:
            self._client = self._thread.run(_create(address, settings))
        except BaseException:
            self._thread.stop()
            raise
        self._thread.before_stop(self._client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends calls that still run, in other threads too, and the connections. Does nothing the second time.

        A signal handler may call it. In a process that is forked from the one of this client it does nothing at all.
        """
        self._thread.stop()

    generate = _blocking(AsyncClient.generate)
    stream = _iterating(AsyncClient.stream)
    chat = _blocking(AsyncClient.chat)
    chat_stream = _iterating(AsyncClient.chat_stream)
    abort = _blocking(AsyncClient.abort)
    tokenize = _blocking(AsyncClient.tokenize)
    detokenize = _blocking(AsyncClient.detokenize)
    models = _blocking(AsyncClient.models)
    model = _blocking(AsyncClient.model)


class SyncGenerationStream:
    """An answer while it comes: an iterator of pieces. All else is as in `GenerationStream`."""

    def __init__(self, thread: LoopThread, stream: GenerationStream) -> None:
        self._thread = thread
        self._stream = stream

    @property
    def request_id(self) -> str:
        """Known with the first piece, as `model`, `seed` and `prompt_tokens`."""
        return self._stream.request_id

    @property
    def model(self) -> str:
        return self._stream.model

    @property
    def seed(self) -> int:
        return self._stream.seed

    @property
    def prompt_tokens(self) -> int:
        return self._stream.prompt_tokens

    @property
    def usage(self) -> Usage | None:
        return self._stream.usage

    @property
    def num_resumes(self) -> int:
        return self._stream.num_resumes

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        piece = self._thread.run(_next(self._stream))
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Ends the request if it still runs; a thread that iterates over it gets RequestAbortedError."""
        self._thread.call_soon(self._stream.close)


async def _next(stream: GenerationStream) -> Piece | None:
    """A coroutine cannot raise StopIteration, nor hand StopAsyncIteration to a future."""
    return await anext(stream, None)


async def _create(address: str | Sequence[str], settings: ClientSettings) -> AsyncClient:
    return AsyncClient(address, **settings)
