"""The application: its routes and how requests reach them. What it serves is told by `/openapi.json`."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from gateway.access import Access, Caller
from gateway.calls import trace_context
from gateway.counts import HttpCounts
from gateway.generation import CallContext
from gateway.generations import Generations
from gateway.limits import MAX_MODEL_NAME_BYTES
from gateway.openai.answer import Answer
from gateway.openai.body import BodyReader, UnreadResponse
from gateway.openai.chat import ChatCompletionRequest
from gateway.openai.completion import CompletionRequest
from gateway.openai.errors import BodyError, error_response, plain_error_response, retry_after
from gateway.openai.fields import GenerationRequest
from gateway.openai.observing import Observing, observation_of
from gateway.openai.openapi import describe, errors, request_body, stream_of
from gateway.openai.shapes import ChatCompletion, Completion, Health, Model, ModelList
from gateway.openai.styles import ChatStyle, CompletionStyle, Style
from gateway.pool import Pool
from holdback.errors import HoldbackError
from holdback.metrics import CONTENT_TYPE
from holdback.request_limits import check_bytes
from holdback.types import TraceContext


def create_app(
    generations: Generations,
    access: Access,
    is_ready: Callable[[], bool],
    counts: HttpCounts,
    metrics: Callable[[], bytes],
) -> ASGIApp:
    """Everything that is served over HTTP.

    Args:
        generations: of the gateway.
        access: says who a request is from; health, metrics and the OpenAPI document ask for nobody.
        is_ready: whether a request sent now would be served.
        counts: of this server.
        metrics: of the process, as text.
    """
    app = FastAPI(
        title="Holdback",
        summary="OpenAI's HTTP API for models on AWS Neuron devices",
        docs_url=None,  # they would load scripts from somebody else's server
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    app.include_router(Api(generations, access, counts).router)
    app.include_router(_operations(is_ready, metrics))
    _describe_errors(app)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return Observing(app, counts.count_request)


class Api:
    """The routes under `/v1`.

    Attributes:
        router: with all of them.
    """

    def __init__(self, generations: Generations, access: Access, counts: HttpCounts) -> None:
        self._generations = generations
        self._access = access
        self._counts = counts
        self._bodies = BodyReader()
        self._created = int(time.time())
        self.router = APIRouter(prefix="/v1")
        self._add_routes()

    def _add_routes(self) -> None:
        for path, handler, request, answer, chunk in (
            ("/completions", self._complete, CompletionRequest, Completion, "Completion"),
            ("/chat/completions", self._chat, ChatCompletionRequest, ChatCompletion, "ChatCompletionChunk"),
        ):
            self.router.add_api_route(
                path,
                handler,
                methods=["POST"],
                response_model=answer,
                responses=errors(400, 401, 404, 408, 413, 415, 429, 431, 499, 500, 503, 504) | stream_of(chunk),
                openapi_extra=request_body(request),
            )
        listing = {"methods": ["GET"], "responses": errors(400, 401, 431)}
        self.router.add_api_route("/models", self._list_models, response_model=ModelList, **listing)  # type: ignore[arg-type]
        finding = {"methods": ["GET"], "responses": errors(400, 401, 404, 431)}
        self.router.add_api_route("/models/{name:path}", self._get_model, response_model=Model, **finding)  # type: ignore[arg-type]

    async def _complete(self, request: Request) -> Response:
        """Completes one prompt or several, as text or token ids."""
        return await self._generate(request, CompletionRequest, CompletionStyle())

    async def _chat(self, request: Request) -> Response:
        """Answers a conversation of text, rendered with the model's own chat template."""
        return await self._generate(request, ChatCompletionRequest, ChatStyle())

    async def _generate(self, request: Request, kind: type[GenerationRequest], style: Style) -> Response:
        caller = self._authenticate(request)
        with self._generations.counting_refusals():
            self._generations.check_open()
            holder = f"key {caller.name}" if caller.name else _address(request)
            read = kind.read(await self._bodies.read(request, holder, self._generations.pools.longest_model_len))
        observation = observation_of(request.scope)
        observation.client_request_id = observation.client_request_id or read.request_id or ""
        call = CallContext(trace=_trace(request), caller=caller, is_stream=bool(read.stream))
        return Answer(style, read, call, self._generations, self._counts)

    async def _list_models(self, request: Request) -> Response:
        """Every name that selects a model, aliases included."""
        self._authenticate(request)
        models = [self._model(pool, name) for pool in self._generations.pools for name in pool.names]
        return JSONResponse(ModelList(data=models).model_dump())

    async def _get_model(self, request: Request, name: str) -> Response:
        """One model by name or alias."""
        self._authenticate(request)
        if not name:
            raise HTTPException(404)
        check_bytes("model", name, MAX_MODEL_NAME_BYTES)
        return JSONResponse(self._model(self._generations.pools.select(name), name).model_dump())

    def _authenticate(self, request: Request) -> Caller:
        """Who calls. Raises UnauthenticatedError, which is counted."""
        with self._generations.counting_refusals():
            caller = self._access.authenticate(request.headers.get("authorization"))
        observation_of(request.scope).caller = caller.name
        return caller

    def _model(self, pool: Pool, name: str) -> Model:
        model = pool.engine.status.model
        return Model(
            id=name,
            created=self._created,
            root=pool.names[0],
            max_model_len=None if model is None else model.max_model_len,
        )


def _operations(is_ready: Callable[[], bool], metrics: Callable[[], bytes]) -> APIRouter:
    """Health and metrics, for those who run the gateway."""
    router = APIRouter()

    @router.get("/health/live", response_model=Health, responses=errors(400, 431))
    async def live() -> Response:
        """The process turns."""
        return JSONResponse(Health(status="ok").model_dump())

    @router.get("/health/ready", response_model=Health, responses=errors(400, 431) | {503: {"model": Health}})
    async def ready() -> Response:
        """A request sent now would be served."""
        if is_ready():
            return JSONResponse(Health(status="ok").model_dump())
        return JSONResponse(Health(status="unready").model_dump(), 503)

    @router.get(
        "/metrics", responses=errors(400, 431) | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    )
    async def show_metrics() -> Response:
        """What this process has counted, as Prometheus reads it."""
        return Response(metrics(), media_type=CONTENT_TYPE)

    return router


def _describe_errors(app: FastAPI) -> None:
    """Every error leaves in OpenAI's shape, those of the framework included."""

    async def on_ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, HoldbackError)  # noqa: S101 - what the registration below says
        return error_response(error)

    async def on_body(_: Request, error: Exception) -> Response:
        assert isinstance(error, BodyError)  # noqa: S101
        is_unread = error.status in (408, 413, 503)
        headers = {"Connection": "close"} if is_unread else {}
        if error.retry_after_s is not None:
            headers |= retry_after(error.retry_after_s)
        response = plain_error_response(error.status, error.message, error.code, headers)
        # who was too slow once would only be waited for again
        return UnreadResponse(response) if is_unread and error.status != 408 else response

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)  # noqa: S101
        shown = repr(request.url.path[:100])
        message = {
            404: f"path {shown} is not known; allowed: those of /openapi.json",
            405: f"method {request.method[:16]!r} is not known for {shown}",
        }.get(error.status_code, str(error.detail))
        return plain_error_response(error.status_code, message, None, dict(error.headers or {}))

    async def on_validation(_: Request, error: Exception) -> Response:
        return plain_error_response(400, f"the request is not as /openapi.json says: {error}"[:300], None)

    app.add_exception_handler(HoldbackError, on_ours)
    app.add_exception_handler(BodyError, on_body)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(RequestValidationError, on_validation)


def _address(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _trace(request: Request) -> TraceContext:
    return trace_context(request.headers.get("traceparent", ""), request.headers.get("tracestate", ""))
