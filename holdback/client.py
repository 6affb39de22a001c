"""The SDK: `AsyncClient` talks to any gateway.

    async with AsyncClient("127.0.0.1:50051") as client:
        answer = await client.generate("The capital of France is", max_tokens=8)
        print(answer.text)
        async for piece in client.stream(messages=[{"role": "user", "content": "Hello!"}]):
            print(piece.text, end="")

Everything that goes wrong is raised as an exception of `holdback.errors`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc.aio

from holdback import codec, rpc
from holdback.answers import Generation, Model, Piece, decode_choice, decode_model, stop_string, stop_token_id
from holdback.errors import InternalError, InvalidArgumentError, RequestAbortedError
from holdback.options import (
    GenerateOptions,
    Message,
    encode_generation,
    encode_messages,
    refuse_second_input,
    set_field,
)
from holdback.tls import NO_TLS, Tls
from holdback.types import Usage
from holdback.v1 import inference_pb2, inference_pb2_grpc

Response = TypeVar("Response")


class GenerationStream:
    """An answer while it comes: an async iterator of pieces.

    The request ends with `close`, with the end of `async with`, and when nothing refers to the stream any more, as
    after leaving the loop early.

    Attributes:
        request_id: known with the first piece, as `model`, `seed` and `prompt_tokens`.
        model: that answers, by its first name.
        seed: of choice 0.
        prompt_tokens: tokens of the prompt.
        usage: None until the answer is complete.
    """

    def __init__(
        self, call: grpc.aio.UnaryStreamCall[inference_pb2.GenerateStreamRequest, inference_pb2.GenerateStreamResponse]
    ) -> None:
        self.request_id = ""
        self.model = ""
        self.seed = 0
        self.prompt_tokens = 0
        self.usage: Usage | None = None
        self._call = call

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        try:
            # no generator: it would refer to itself, and a loop that is left would go on at the gateway
            while isinstance(response := await self._call.read(), inference_pb2.GenerateStreamResponse):
                piece = self._decode(response)
                if piece is not None:
                    return piece
        except grpc.aio.AioRpcError as failure:
            raise rpc.error_from_rpc(failure) from failure
        except asyncio.CancelledError:
            _raise_if_closed()
            self._call.cancel()
            raise
        if self.usage is None:
            raise InternalError("the gateway ended the stream without saying that it is complete")
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop may be gone already
            self._call.cancel()

    def close(self) -> None:
        """Ends the request if it still runs; who iterates over it gets RequestAbortedError."""
        self._call.cancel()

    def _decode(self, response: inference_pb2.GenerateStreamResponse) -> Piece | None:
        event = response.WhichOneof("event")
        if event == "started":
            started = response.started
            self.request_id, self.model, self.seed = started.request_id, started.model, started.seed
            self.prompt_tokens = started.prompt_tokens
        elif event == "delta":
            delta = response.delta
            logprobs = tuple(map(codec.decode_logprobs, delta.logprobs))
            return Piece(delta.text, delta.index, tuple(delta.token_ids), logprobs)
        elif event == "end":
            end = response.end
            return Piece(
                index=end.index,
                finish_reason=codec.decode_finish_reason(end.finish_reason),
                stop_string=stop_string(end.stop_reason),
                stop_token_id=stop_token_id(end.stop_reason),
            )
        elif event == "finished":
            self.usage = codec.decode_usage(response.finished.usage)
        return None


def check_address(address: str) -> None:
    """gRPC itself would take port 65537 for port 1. Raises InvalidArgumentError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise InvalidArgumentError.of("address", address, "host:port, with a port in [1, 65535]")


class AsyncClient:
    """A client of one gateway. Use it as an async context manager, or `close` it."""

    def __init__(self, address: str, *, timeout_s: float | None = None, tls: Tls = NO_TLS) -> None:
        """
        Args:
            address: of the gateway, `host:port`.
            timeout_s: after which a call is given up, at the scheduler too, with DeadlineExceededError; None: never.
            tls: of the connection; by default there is none.

        Raises:
            InvalidArgumentError: the address has no port in [1, 65535], or the timeout is not above 0.
            ConfigError: a file of `tls` cannot be read, or is none.
        """
        check_address(address)
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise InvalidArgumentError.of("timeout_s", timeout_s, "a number above 0")
        self._timeout_s = timeout_s
        self._channel = rpc.create_channel(address, tls)
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(
            self._channel
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends calls that still run, and the connection."""
        await self._channel.close()

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Generates and returns the complete answer.

        Args:
            prompt: text to go on from; exactly one of `prompt`, `messages` and `token_ids` is given.
            options: as in `GenerateOptions`.

        Raises:
            InvalidArgumentError: a field is wrong; it says which, its value and what is allowed.
            HoldbackError: any other of `holdback.errors`.
        """
        request = inference_pb2.GenerateRequest(generation=encode_generation(prompt, options))
        response = await self._call(self._stub.Generate(request, timeout=self._timeout_s))
        return Generation(
            request_id=response.request_id,
            model=response.model,
            seed=response.seed,
            choices=tuple(map(decode_choice, response.choices)),
            usage=codec.decode_usage(response.usage),
        )

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Generates and returns the answer piece by piece: `async for piece in client.stream("..."): ...`.

        Takes what `generate` takes; what `generate` raises is raised by the iteration, except for a field that cannot
        be sent at all.
        """
        request = inference_pb2.GenerateStreamRequest(generation=encode_generation(prompt, options))
        return GenerationStream(self._stub.GenerateStream(request, timeout=self._timeout_s))

    async def abort(self, request_id: str) -> None:
        """Ends a request that the gateway runs. Raises NotFoundError for any other id."""
        await self._call(self._stub.Abort(inference_pb2.AbortRequest(request_id=request_id), timeout=self._timeout_s))

    async def tokenize(
        self, text: str | None = None, *, messages: Sequence[Message] | None = None, model: str = ""
    ) -> list[int]:
        """Token ids of text or of a conversation, exactly as `generate` would run it."""
        request = inference_pb2.TokenizeRequest(model=model)
        if text is not None:
            request.text = text
        if messages is not None:
            refuse_second_input(request.WhichOneof("input"))
            request.chat.CopyFrom(encode_messages(messages))
        response = await self._call(self._stub.Tokenize(request, timeout=self._timeout_s))
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", keep_special_tokens: bool = False) -> str:
        """Text of token ids; bytes that form no character are U+FFFD."""
        request = inference_pb2.DetokenizeRequest(model=model, keep_special_tokens=keep_special_tokens)
        set_field(request, "token_ids", token_ids)
        response = await self._call(self._stub.Detokenize(request, timeout=self._timeout_s))
        return response.text

    async def models(self) -> list[Model]:
        """The models that the gateway serves, in the order of its configuration."""
        request = inference_pb2.ListModelsRequest()
        response = await self._call(self._stub.ListModels(request, timeout=self._timeout_s))
        return [decode_model(model) for model in response.models]

    async def model(self, name: str = "") -> Model:
        """One model by name or alias; empty for the only one. Raises NotFoundError."""
        request = inference_pb2.GetModelRequest(model=name)
        response = await self._call(self._stub.GetModel(request, timeout=self._timeout_s))
        return decode_model(response.model)

    async def _call(self, call: Awaitable[Response]) -> Response:
        try:
            return await call
        except grpc.aio.AioRpcError as failure:
            raise rpc.error_from_rpc(failure) from failure
        except asyncio.CancelledError:
            _raise_if_closed()
            raise


def _raise_if_closed() -> None:
    """gRPC cancels the awaiting task when a call or client is closed; nobody has asked that task to stop."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        raise RequestAbortedError("the call was closed on this side") from None
