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
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import grpc.aio

from holdback import codec, rpc
from holdback.errors import InternalError, InvalidArgumentError, RequestAbortedError
from holdback.types import FinishReason, ModelInfo, TokenLogprobs, Usage
from holdback.v1 import inference_pb2, inference_pb2_grpc, types_pb2

Response = TypeVar("Response")
Message = Mapping[str, str]
"""One message of a conversation: `{"role": ..., "content": ...}`."""


class GenerateOptions(TypedDict, total=False):
    """Options of `AsyncClient.generate` and `stream`. An option that is None is as one that is not given.

    Attributes:
        messages: a conversation instead of a prompt, each message a mapping of `role` and `content`.
        token_ids: a prompt as token ids instead of text.
        model: a served model or an alias; not given: the only one.
        request_id: at most 256 bytes, for `abort`; not given: the gateway makes one.
        n: independent choices, in [1, 128]; 1 by default.
        stop: a string, or at most 16 of them, that end a choice and are left out of its text.
        keep_special_tokens: special tokens appear in the text; False by default.
        echo: the text starts with the prompt; False by default.
        priority: in [-128, 127], 0 by default; lower is served first where the pool's policy is `priority`.
        cache_salt: at most 256 bytes; cached blocks are shared between requests of equal salt only.
        output_token_ids: outputs received before a stream broke, to go on after them; needs its `seed`, and `n` 1.
        temperature: in [0, 1000], 1 by default; 0 is greedy.
        top_k: keep the k most likely tokens, >= 1; 0 and -1 keep all, which is the default.
        top_p: in [0, 1], 1 by default; 0 keeps exactly the most likely token.
        min_p: in [0, 1], 0 by default.
        repetition_penalty: in (0, 10], 1 by default; counts prompt and output.
        presence_penalty: in [-2, 2], 0 by default; counts outputs.
        frequency_penalty: in [-2, 2], 0 by default; counts outputs.
        seed: signed 64 bit; not given: the gateway draws one and tells it.
        max_tokens: at least 1; not given: the pool's `default_max_tokens`. Cut to what fits.
        min_tokens: in [0, max_tokens], 0 by default; EOS and stop tokens are not sampled before.
        ignore_eos: EOS does not end a choice; False by default.
        stop_token_ids: at most 1,024 tokens that end a choice besides EOS.
        allowed_token_ids: at most 1,024 tokens, the only ones that may be sampled; not given: all.
        logit_bias: at most 1,024 tokens and what is added to their logits, in [-100, 100].
        num_logprobs: in [0, 20]; log-probabilities of the chosen and of this many most likely tokens.
    """

    messages: Sequence[Message] | None
    token_ids: Sequence[int] | None
    model: str | None
    request_id: str | None
    n: int | None
    stop: str | Sequence[str] | None
    keep_special_tokens: bool | None
    echo: bool | None
    priority: int | None
    cache_salt: str | None
    output_token_ids: Sequence[int] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop_token_ids: Sequence[int] | None
    allowed_token_ids: Sequence[int] | None
    logit_bias: Mapping[int, float] | None
    num_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete choice.

    Attributes:
        index: in [0, n).
        text: what the output adds to the prompt; stop strings and the token that ended it are left out.
        token_ids: every sampled token, a final EOS or stop token included.
        finish_reason: why it ended.
        stop_string: the stop string that matched, with STOP.
        stop_token_id: the stop token that was sampled, with STOP; None for EOS.
        logprobs: one for each of `token_ids`, if asked for.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete answer. `text`, `token_ids` and `finish_reason` are those of the first choice.

    Attributes:
        request_id: of the request.
        model: that answered, by its first name.
        seed: of choice 0; choice k has seed + k. The same request with this seed draws the same random numbers.
        choices: one for each of `n`.
        usage: the prompt counted once, completions summed.
    """

    request_id: str
    model: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of one choice. The texts of a choice's pieces concatenate to its text.

    Attributes:
        text: that became certain; may be empty.
        index: of the choice.
        token_ids: new tokens; text of a token may come with a later piece.
        logprobs: one for each of `token_ids`, if asked for.
        finish_reason: set on the last piece of each choice.
        stop_string: as in `Choice`.
        stop_token_id: as in `Choice`.
    """

    text: str = ""
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model that a gateway serves.

    Attributes:
        name: it is shown by.
        aliases: that select it too.
        info: what runs; None while that is not known.
        default_max_tokens: of a request that names none; 0 is as much as fits.
        is_ready: a request sent now would be served.
    """

    name: str
    aliases: tuple[str, ...]
    info: ModelInfo | None
    default_max_tokens: int
    is_ready: bool


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
                stop_string=_stop_string(end.stop_reason),
                stop_token_id=_stop_token_id(end.stop_reason),
            )
        elif event == "finished":
            self.usage = codec.decode_usage(response.finished.usage)
        return None


class AsyncClient:
    """A client of one gateway. Use it as an async context manager, or `close` it."""

    def __init__(self, address: str, *, timeout_s: float | None = None) -> None:
        """
        Args:
            address: of the gateway, `host:port`.
            timeout_s: after which a call is given up, at the scheduler too, with DeadlineExceededError; None: never.
        """
        self._timeout_s = timeout_s
        self._channel = rpc.create_channel(address)
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
        request = inference_pb2.GenerateRequest(generation=_encode(prompt, options))
        response = await self._call(self._stub.Generate(request, timeout=self._timeout_s))
        return Generation(
            request_id=response.request_id,
            model=response.model,
            seed=response.seed,
            choices=tuple(map(_decode_choice, response.choices)),
            usage=codec.decode_usage(response.usage),
        )

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Generates and returns the answer piece by piece: `async for piece in client.stream("..."): ...`.

        Takes what `generate` takes; what `generate` raises is raised by the iteration, except for a field that cannot
        be sent at all.
        """
        request = inference_pb2.GenerateStreamRequest(generation=_encode(prompt, options))
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
            _refuse_second_input(request.WhichOneof("input"))
            request.chat.CopyFrom(_encode_messages(messages))
        response = await self._call(self._stub.Tokenize(request, timeout=self._timeout_s))
        return list(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", keep_special_tokens: bool = False) -> str:
        """Text of token ids; bytes that form no character are U+FFFD."""
        request = inference_pb2.DetokenizeRequest(model=model, keep_special_tokens=keep_special_tokens)
        _set("token_ids", token_ids, request.token_ids.extend)
        response = await self._call(self._stub.Detokenize(request, timeout=self._timeout_s))
        return response.text

    async def models(self) -> list[Model]:
        """The models that the gateway serves, in the order of its configuration."""
        request = inference_pb2.ListModelsRequest()
        response = await self._call(self._stub.ListModels(request, timeout=self._timeout_s))
        return [_decode_model(model) for model in response.models]

    async def model(self, name: str = "") -> Model:
        """One model by name or alias; empty for the only one. Raises NotFoundError."""
        request = inference_pb2.GetModelRequest(model=name)
        response = await self._call(self._stub.GetModel(request, timeout=self._timeout_s))
        return _decode_model(response.model)

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


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "num_logprobs",
)
_SCALARS = ("model", "request_id", "n", "keep_special_tokens", "echo", "priority", "cache_salt")


def _encode(prompt: str | None, options: GenerateOptions) -> inference_pb2.Generation:
    """The message of a request. Raises InvalidArgumentError for a value that its field cannot hold."""
    given = {name: value for name, value in options.items() if value is not None}
    unknown = given.keys() - GenerateOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    message = inference_pb2.Generation()
    _encode_input(message, prompt, given)
    for name in _SCALARS:
        if name in given:
            _set(name, given[name], functools.partial(setattr, message, name))
    stop = given.get("stop", ())
    _set("stop", (stop,) if isinstance(stop, str) else stop, message.stop.extend)
    _set("output_token_ids", given.get("output_token_ids", ()), message.output_token_ids.extend)
    sampling = _encode_sampling(given)
    if sampling.ListFields():
        message.sampling.CopyFrom(sampling)
    return message


def _encode_input(message: inference_pb2.Generation, prompt: str | None, given: Mapping[str, Any]) -> None:
    if prompt is not None:
        _set("prompt", prompt, functools.partial(setattr, message, "text"))
    if "messages" in given:
        _refuse_second_input(message.WhichOneof("input"))
        message.chat.CopyFrom(_encode_messages(given["messages"]))
    if "token_ids" in given:
        _refuse_second_input(message.WhichOneof("input"))
        message.token_ids.SetInParent()
        _set("token_ids", given["token_ids"], message.token_ids.token_ids.extend)


def _refuse_second_input(first: str | None) -> None:
    if first is not None:
        raise InvalidArgumentError.of("input", "more than one of prompt, messages and token_ids", "exactly one")


def _encode_messages(messages: Sequence[Message]) -> inference_pb2.ChatMessages:
    chat = inference_pb2.ChatMessages()
    for index, message in enumerate(messages):
        _set(f"messages[{index}]", message, lambda fields: chat.messages.add(**fields))
    return chat


def _encode_sampling(given: Mapping[str, Any]) -> types_pb2.SamplingParams:
    message = types_pb2.SamplingParams()
    for name in _SAMPLING:
        if name in given:
            _set(f"sampling.{name}", given[name], functools.partial(setattr, message, name))
    _set("sampling.stop_token_ids", given.get("stop_token_ids", ()), message.stop_token_ids.extend)
    if "allowed_token_ids" in given:
        message.allowed_token_ids.SetInParent()
        _set("sampling.allowed_token_ids", given["allowed_token_ids"], message.allowed_token_ids.token_ids.extend)
    for token_id, bias in given.get("logit_bias", {}).items():
        entry = {"token_id": token_id, "bias": bias}
        _set("sampling.logit_bias", entry, lambda fields: message.logit_bias.add(**fields))
    return message


def _set(field: str, value: Any, setter: Callable[[Any], object]) -> None:
    """Puts a value into a message, which refuses one that its field cannot hold: -1 in an unsigned one, text."""
    try:
        setter(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError.of(field, value, f"what the field can hold ({error})") from None


def _decode_choice(message: inference_pb2.Choice) -> Choice:
    return Choice(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=codec.decode_finish_reason(message.finish_reason),
        stop_string=_stop_string(message.stop_reason),
        stop_token_id=_stop_token_id(message.stop_reason),
        logprobs=tuple(map(codec.decode_logprobs, message.logprobs)),
    )


def _stop_string(reason: inference_pb2.StopReason) -> str | None:
    return reason.stop_string if reason.WhichOneof("reason") == "stop_string" else None


def _stop_token_id(reason: inference_pb2.StopReason) -> int | None:
    return reason.stop_token_id if reason.WhichOneof("reason") == "stop_token_id" else None


def _decode_model(message: inference_pb2.Model) -> Model:
    return Model(
        name=message.name,
        aliases=tuple(message.aliases),
        info=codec.decode_model_info(message.info) if message.HasField("info") else None,
        default_max_tokens=message.default_max_tokens,
        is_ready=message.ready,
    )
