"""The SDK: `AsyncClient` talks to any gateway. `Client` (`holdback.sync_client`) is the same for plain threads.

    async with AsyncClient("127.0.0.1:50051") as client:
        answer = await client.generate("The capital of France is", max_tokens=8)
        print(answer.text)
        async for piece in client.chat_stream([{"role": "user", "content": "Hello!"}]):
            print(piece.text, end="")

Everything that goes wrong is raised as an exception of `holdback.errors`.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, Unpack

import grpc.aio

from holdback import codec
from holdback.answers import Generation, Model, decode_choice, decode_model
from holdback.endpoints import Endpoint, Endpoints, check_addresses, metadata_of
from holdback.errors import InvalidArgumentError, NotFoundError
from holdback.options import (
    ChatOptions,
    GenerateOptions,
    Message,
    encode_generation,
    encode_messages,
    refuse_second_input,
    set_field,
)
from holdback.retries import Backoff, Deadline, Failure, check_count
from holdback.streaming import GenerationStream, StreamCall, raise_if_closed
from holdback.tls import NO_TLS, Tls
from holdback.v1 import inference_pb2, inference_pb2_grpc

__all__ = ["AsyncClient"]

Response = TypeVar("Response")
Method: TypeAlias = "Callable[[inference_pb2_grpc.InferenceServiceAsyncStub], Callable[..., Awaitable[Response]]]"


class AsyncClient:
    """A client of one gateway, or of several that serve the same. Use it as an async context manager, or `close` it.

    It belongs to the event loop on which it is first called, and may be made before that runs.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        tls: Tls = NO_TLS,
        api_key: str | None = None,
        insecure_api_key: bool = False,
        max_retries: int = 4,
        max_resumes: int = 8,
    ) -> None:
        """
        Args:
            address: of the gateway, `host:port`; or several, which are called in turn; or `dns:///name:port` for all
                addresses of a name, which are called in turn, too.
            timeout_s: after which a call is given up, at the scheduler too, with DeadlineExceededError; all tries of
                it together. None: never.
            tls: of the connections; by default there is none.
            api_key: sent with every call.
            insecure_api_key: allow that it travels without TLS to another machine.
            max_retries: how often in a row a call is tried again where that is safe; 0 never.
            max_resumes: how often one stream goes on after it broke; 0 never.

        Raises:
            InvalidArgumentError: an address has no port in [1, 65535], the timeout is not above 0, or another argument
                is not allowed.
            ConfigError: a file of `tls` cannot be read, or is none.
        """
        addresses = check_addresses(address)
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
            raise InvalidArgumentError.of("timeout_s", timeout_s, "a number above 0")
        check_count("max_retries", max_retries)
        check_count("max_resumes", max_resumes)
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._max_resumes = max_resumes
        self._metadata = metadata_of(api_key, addresses, tls, insecure=insecure_api_key)
        self._endpoints = Endpoints(addresses, tls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends calls that still run, and the connections."""
        await self._endpoints.close()

    async def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Generates and returns the complete answer.

        Args:
            prompt: text to go on from; exactly one of `prompt`, `messages` and `token_ids` is given.
            options: as in `GenerateOptions`.

        Raises:
            InvalidArgumentError: a field is wrong; it says which, its value and what is allowed.
            UnavailableError: nothing can serve it, or its connection was lost when it may have begun; a stream would
                have gone on.
            HoldbackError: any other of `holdback.errors`.
        """
        request = inference_pb2.GenerateRequest(generation=encode_generation(prompt, options))
        response: inference_pb2.GenerateResponse = await self._call(lambda stub: stub.Generate, request, repeats=False)
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
        be sent at all. A stream of several choices (`n`) cannot go on after it broke: it raises UnavailableError.
        """
        deadline = Deadline(self._timeout_s)
        return GenerationStream(
            encode_generation(prompt, options),
            functools.partial(self._start_stream, deadline),
            Backoff(self._max_retries, deadline),
            max_resumes=self._max_resumes,
        )

    async def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Generation:
        """The answer to a conversation: `await client.chat([{"role": "user", "content": "Hello!"}])`.

        As `generate`, whose `messages` these are.
        """
        return await self.generate(messages=messages, **options)

    def chat_stream(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> GenerationStream:
        """The answer to a conversation, piece by piece. As `stream`, whose `messages` these are."""
        return self.stream(messages=messages, **options)

    async def abort(self, request_id: str) -> None:
        """Ends a request that a gateway runs. Raises NotFoundError for any other id.

        Every address is asked. Of the gateways behind one name of the DNS only one is asked: to end a
        stream of your own, close it.
        """
        request = inference_pb2.AbortRequest()
        set_field(request, "request_id", request_id)
        asking = [self._call(lambda stub: stub.Abort, request, endpoint=endpoint) for endpoint in self._endpoints]
        results: list[object] = await asyncio.gather(*asking, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if len(errors) == len(results):
            raise min(errors, key=lambda error: isinstance(error, NotFoundError))

    async def tokenize(
        self, text: str | None = None, *, messages: Sequence[Message] | None = None, model: str = ""
    ) -> list[int]:
        """Token ids of text or of a conversation, exactly as `generate` would run it."""
        request = inference_pb2.TokenizeRequest()
        set_field(request, "model", model)
        if text is not None:
            set_field(request, "text", text)
        if messages is not None:
            refuse_second_input(request.WhichOneof("input"))
            request.chat.CopyFrom(encode_messages(messages))
        response: inference_pb2.TokenizeResponse = await self._call(lambda stub: stub.Tokenize, request)
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", keep_special_tokens: bool = False) -> str:
        """Text of token ids; bytes that form no character are U+FFFD."""
        request = inference_pb2.DetokenizeRequest()
        set_field(request, "model", model)
        set_field(request, "keep_special_tokens", keep_special_tokens)
        set_field(request, "token_ids", token_ids)
        response: inference_pb2.DetokenizeResponse = await self._call(lambda stub: stub.Detokenize, request)
        return response.text

    async def models(self) -> list[Model]:
        """The models that the gateway serves, in the order of its configuration."""
        request = inference_pb2.ListModelsRequest()
        response: inference_pb2.ListModelsResponse = await self._call(lambda stub: stub.ListModels, request)
        return [decode_model(model) for model in response.models]

    async def model(self, name: str = "") -> Model:
        """One model by name or alias; empty for the only one. Raises NotFoundError."""
        request = inference_pb2.GetModelRequest()
        set_field(request, "model", name, "name")
        response: inference_pb2.GetModelResponse = await self._call(lambda stub: stub.GetModel, request)
        return decode_model(response.model)

    async def _call(
        self, method: Method[Response], request: Any, *, repeats: bool = True, endpoint: Endpoint | None = None
    ) -> Response:
        """Calls a method until it answers or may not be tried again.

        Args:
            repeats: it does no harm to call it again when it may have been answered already.
            endpoint: to call; None for the one whose turn it is.
        """
        deadline = Deadline(self._timeout_s)
        backoff = Backoff(self._max_retries, deadline)
        while True:
            called = endpoint or self._endpoints.next()
            try:
                call = method(called.stub)
                return await call(request, timeout=deadline.left_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as failed:
                failure = Failure.of(failed, called)
                if not failure.was_not_taken and not failure.was_lost:
                    raise failure.error from failed
                if not failure.was_not_taken and not repeats:
                    raise failure.explain("the generation may have begun, so it is not tried again") from failed
                await asyncio.sleep(backoff.wait_after(failure.error))
            except asyncio.CancelledError:
                raise_if_closed()
                raise

    def _start_stream(
        self, deadline: Deadline, request: inference_pb2.GenerateStreamRequest
    ) -> tuple[Endpoint, StreamCall]:
        endpoint = self._endpoints.next()
        call: StreamCall = endpoint.stub.GenerateStream(request, timeout=deadline.left_s, metadata=self._metadata)
        return endpoint, call
