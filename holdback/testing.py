"""A gateway for the tests of programs that use the SDK: real gRPC on loopback, answers as the test says.

    with MockGateway() as gateway, Client(gateway.address) as client:
        gateway.script(Answer("Par", "is"))
        assert client.generate("The capital of France is").text == "Paris"
        assert gateway.calls[0].request.generation.text == "The capital of France is"

No model, tokenizer or scheduler is involved. The tokens of a text are the code points of its characters, so that all
that counts tokens, cuts at `max_tokens`, or resumes a broken stream can be worked out by hand. Stop strings and the
other sampling parameters are noted and change nothing. It runs in a thread of its own, and serves `Client`,
`AsyncClient` and clients in other languages.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import Message as ProtobufMessage

from holdback import codec, rpc
from holdback.background import LoopThread
from holdback.errors import (
    ErrorReason,
    HoldbackError,
    InternalError,
    NotFoundError,
    UnauthenticatedError,
)
from holdback.types import FinishReason, TokenLogprobs, Usage
from holdback.v1 import inference_pb2, inference_pb2_grpc

DRAWN_SEED = 7
Event = inference_pb2.GenerateStreamResponse
Context = grpc.aio.ServicerContext[Any, Any]


class Answer:
    """What one generation answers."""

    def __init__(
        self,
        *pieces: str,
        finish_reason: FinishReason = FinishReason.STOP,
        error: HoldbackError | None = None,
        breaks_after: int | Sequence[int] = (),
        delay_s: float | Sequence[float] = 0.0,
    ) -> None:
        """
        Args:
            pieces: of the text, one message of a stream each.
            finish_reason: of its end.
            error: instead of an end. With no pieces the request is refused with it before it begins.
            breaks_after: the connection breaks after this many pieces, or, one more than there are, between the end and
                the usage; several numbers: again after so many in all, when the stream was resumed.
            delay_s: before each piece and before the end; several numbers: before the first one, the second one, ...
        """
        self.pieces = pieces
        self.finish_reason = finish_reason
        self.error = error
        self.breaks_after = (breaks_after,) if isinstance(breaks_after, int) else tuple(breaks_after)
        num_delays = len(pieces) + 1
        self.delays_s = [delay_s] * num_delays if isinstance(delay_s, float | int) else [*delay_s, *[0.0] * num_delays]


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the gateway got.

    Attributes:
        method: its name in `InferenceService`, for example `GenerateStream`.
        request: its message.
        api_key: it came with; None without.
        ended: set when nothing of the call is left: it was answered, or its client went away.
    """

    method: str
    request: Any
    api_key: str | None
    ended: threading.Event = field(default_factory=threading.Event)


class MockGateway:
    """A gateway that answers what it was told to. Use it as a context manager, plain or async.

    Attributes:
        calls: all so far, the first one first.
    """

    def __init__(self, *answers: Answer, model: str = "mock", api_key: str | None = None) -> None:
        """
        Args:
            answers: as `script` takes them.
            model: name of the only model.
            api_key: that each call must come with; None: none.
        """
        self.calls: list[Call] = []
        self._servicer = _Servicer(self.calls, model, api_key)
        self._thread: LoopThread | None = None
        self._server: grpc.aio.Server | None = None
        self._port = 0
        self.script(*answers)

    @property
    def address(self) -> str:
        """Where it listens, once started."""
        return f"127.0.0.1:{self._port}"

    def script(self, *answers: Answer) -> None:
        """Adds answers; each generation takes the next one. A generation for which there is none ends with INTERNAL.

        A resumed stream goes on with the answer that it began with.
        """
        self._servicer.answers.extend(answers)

    def start(self) -> None:
        """Listens: on a free port at first, on the same one again after `stop`."""
        self._thread = LoopThread("mock gateway")
        self._thread.run(self._start())

    def stop(self) -> None:
        """Breaks all connections, as a gateway does that dies. Does nothing the second time."""
        if self._thread is not None:
            self._thread.run(self._stop())
            self._thread.stop()
            self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    async def _start(self) -> None:
        self._server = rpc.create_server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._servicer, self._server)
        self._port = rpc.bind(self._server, "127.0.0.1", self._port)
        await self._server.start()

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)


@dataclass
class _Run:
    """A generation from its first call to its end, over all calls that resume it."""

    answer: Answer
    breaks: list[int]
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class _Servicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, calls: list[Call], model: str, api_key: str | None) -> None:
        self.answers = collections.deque[Answer]()
        self._calls = calls
        self._model = model
        self._api_key = api_key
        self._ids = itertools.count(1)
        self._runs: dict[str, _Run] = {}
        self._broken: dict[str, _Run] = {}

    async def GenerateStream(  # noqa: N802
        self, request: inference_pb2.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[Event]:
        call = await self._note("GenerateStream", request, context)
        try:
            async for event in self._generate(request.generation, context):
                yield event
        finally:
            call.ended.set()

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        call = await self._note("Generate", request, context)
        try:
            response = inference_pb2.GenerateResponse()
            async for event in self._generate(request.generation, context):
                _collect(event, response)
            return response
        finally:
            call.ended.set()

    async def Abort(  # noqa: N802
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        (await self._note("Abort", request, context)).ended.set()
        run = self._runs.get(request.request_id)
        if run is None:
            message = f"request_id is {request.request_id!r}; allowed: the id of a request that runs"
            await rpc.abort(context, NotFoundError(message, reason=ErrorReason.REQUEST_NOT_FOUND))
        run.aborted.set()
        return inference_pb2.AbortResponse()

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        (await self._note("Tokenize", request, context)).ended.set()
        return inference_pb2.TokenizeResponse(token_ids=map(ord, _text_of(request)))

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        (await self._note("Detokenize", request, context)).ended.set()
        return inference_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        (await self._note("ListModels", request, context)).ended.set()
        return inference_pb2.ListModelsResponse(models=[self._describe()])

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: Context
    ) -> inference_pb2.GetModelResponse:
        (await self._note("GetModel", request, context)).ended.set()
        if request.model not in ("", self._model):
            await rpc.abort(context, NotFoundError(f"model is {request.model!r}; allowed: {self._model}"))
        return inference_pb2.GetModelResponse(model=self._describe())

    async def GetLoad(  # noqa: N802
        self, request: inference_pb2.InferenceServiceGetLoadRequest, context: Context
    ) -> inference_pb2.InferenceServiceGetLoadResponse:
        (await self._note("GetLoad", request, context)).ended.set()
        return inference_pb2.InferenceServiceGetLoadResponse(model=self._model)

    async def _note(self, method: str, request: ProtobufMessage, context: Context) -> Call:
        header = dict(context.invocation_metadata() or ()).get("authorization")
        key = None if header is None else str(header).removeprefix("Bearer ")
        call = Call(method, request, key)
        self._calls.append(call)
        if self._api_key is not None and key != self._api_key:
            call.ended.set()
            await rpc.abort(context, UnauthenticatedError("the API key is not known"))
        return call

    def _describe(self) -> inference_pb2.Model:
        return inference_pb2.Model(name=self._model, ready=True)

    async def _generate(self, request: inference_pb2.Generation, context: Context) -> AsyncIterator[Event]:
        run = self._broken.pop(request.request_id, None) or self._next_run()
        if run.answer.error is not None and not run.answer.pieces:
            await rpc.abort(context, run.answer.error)
        request_id = request.request_id or f"mock-{next(self._ids)}"
        self._runs[request_id] = run
        try:
            yield Event(started=self._started(request_id, request))
            async for event in _events(run, request):
                yield event
        except _BrokenError:
            self._broken[request_id] = run
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke, as the test asked for")
        except HoldbackError as error:
            await rpc.abort(context, error)
        finally:
            del self._runs[request_id]

    def _next_run(self) -> _Run:
        answer = self.answers.popleft() if self.answers else Answer(error=InternalError("no answer is scripted"))
        return _Run(answer, list(answer.breaks_after))

    def _started(self, request_id: str, request: inference_pb2.Generation) -> inference_pb2.GenerationStarted:
        seed = request.sampling.seed if request.sampling.HasField("seed") else DRAWN_SEED
        num_tokens = len(_text_of(request))
        return inference_pb2.GenerationStarted(
            request_id=request_id, model=self._model, seed=seed, prompt_tokens=num_tokens
        )


class _BrokenError(Exception):
    """The connection is to break here."""


async def _events(run: _Run, request: inference_pb2.Generation) -> AsyncIterator[Event]:
    """Everything after the first message. Raises the answer's error, or _BrokenError."""
    answer, prompt = run.answer, _text_of(request)
    choices = range(request.n if request.HasField("n") else 1)
    for index in choices if request.echo else ():
        yield Event(delta=inference_pb2.ChoiceDelta(index=index, text=prompt))
    finish_reason, num_outputs = _finish_reason(answer, request), len(request.output_token_ids)
    for number, text in _rest(answer, request):
        _break_at(run, number)
        if await _is_aborted(run, number):
            break
        num_outputs += len(text)
        for index in choices:
            yield Event(delta=_delta(index, text, request))
    else:
        _break_at(run, len(answer.pieces))
        if answer.error is not None:
            raise answer.error
    if await _is_aborted(run, len(answer.pieces)):
        finish_reason = FinishReason.ABORT
    for index in choices:
        yield Event(end=inference_pb2.ChoiceEnd(index=index, finish_reason=codec.encode_finish_reason(finish_reason)))
    _break_at(run, len(answer.pieces) + 1)
    usage = codec.encode_usage(Usage(len(prompt), num_outputs * len(choices), 0))
    yield Event(finished=inference_pb2.GenerationFinished(usage=usage))


def _rest(answer: Answer, request: inference_pb2.Generation) -> Iterator[tuple[int, str]]:
    """What is to be sent of each piece, with its number: from the resumed outputs on, up to `max_tokens`."""
    start, limit = 0, _max_tokens(request)
    num_known = len(request.output_token_ids)
    for number, piece in enumerate(answer.pieces):
        text = piece[max(0, num_known - start) : None if limit is None else max(0, limit - start)]
        start += len(piece)
        if text:
            yield number, text


def _finish_reason(answer: Answer, request: inference_pb2.Generation) -> FinishReason:
    limit = _max_tokens(request)
    is_cut = limit is not None and sum(map(len, answer.pieces)) >= limit
    return FinishReason.LENGTH if is_cut else answer.finish_reason


def _max_tokens(request: inference_pb2.Generation) -> int | None:
    return request.sampling.max_tokens if request.sampling.HasField("max_tokens") else None


def _break_at(run: _Run, num_pieces: int) -> None:
    if run.breaks and run.breaks[0] == num_pieces:
        run.breaks.pop(0)
        raise _BrokenError


async def _is_aborted(run: _Run, number: int) -> bool:
    """Waits before a piece, or before the end; True if an abort came before or meanwhile."""
    delay_s = run.answer.delays_s[number]
    if delay_s and not run.aborted.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run.aborted.wait(), delay_s)
    return run.aborted.is_set()


def _delta(index: int, text: str, request: inference_pb2.Generation) -> inference_pb2.ChoiceDelta:
    token_ids = [ord(character) for character in text]
    logprobs = [codec.encode_logprobs(TokenLogprobs(token_id, 0.0)) for token_id in token_ids]
    if not request.sampling.HasField("num_logprobs"):
        logprobs = []
    return inference_pb2.ChoiceDelta(index=index, text=text, token_ids=token_ids, logprobs=logprobs)


def _text_of(request: inference_pb2.Generation | inference_pb2.TokenizeRequest) -> str:
    """The prompt; of a conversation the contents of its messages, one after another."""
    if request.WhichOneof("input") == "chat":
        return "".join(message.content for message in request.chat.messages)
    if isinstance(request, inference_pb2.Generation) and request.WhichOneof("input") == "token_ids":
        return "".join(map(chr, request.token_ids.token_ids))
    return request.text


def _collect(event: Event, response: inference_pb2.GenerateResponse) -> None:
    """Adds what a stream would say to the complete answer."""
    kind = event.WhichOneof("event")
    if kind == "started":
        started = event.started
        response.request_id, response.model, response.seed = started.request_id, started.model, started.seed
    elif kind == "delta":
        choice = _choice(response, event.delta.index)
        choice.text += event.delta.text
        choice.token_ids.extend(event.delta.token_ids)
        choice.logprobs.extend(event.delta.logprobs)
    elif kind == "end":
        _choice(response, event.end.index).finish_reason = event.end.finish_reason
    elif kind == "finished":
        response.usage.CopyFrom(event.finished.usage)


def _choice(response: inference_pb2.GenerateResponse, index: int) -> inference_pb2.Choice:
    while len(response.choices) <= index:
        response.choices.add(index=len(response.choices))
    return response.choices[index]
