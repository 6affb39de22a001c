"""The OpenAPI document: what the framework finds, and the bodies that it does not see because they are read by hand."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pydantic
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gateway.openai.chat import ChatCompletionRequest
from gateway.openai.completion import CompletionRequest
from gateway.openai.shapes import ChatCompletionChunk, ErrorAnswer

REF = "#/components/schemas/{model}"
DESCRIPTIONS = {
    400: "The request is wrong; `param` names the field.",
    401: "No API key, or none that is known.",
    404: "No such model.",
    408: "The body came too slowly.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    429: "Full, or the key's limit; `Retry-After` says when to try again.",
    431: "The headers are too long.",
    499: "Somebody ended the request before it began.",
    500: "A fault of the service.",
    503: "Nothing is there to serve it now.",
    504: "A deadline passed.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of a route."""
    return {status: {"model": ErrorAnswer, "description": DESCRIPTIONS[status]} for status in statuses}


def request_body(kind: type[pydantic.BaseModel]) -> dict[str, Any]:
    """The body of a route."""
    schema = {"$ref": REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def stream_of(chunk: str) -> dict[int | str, dict[str, Any]]:
    """The other form of a response: events with `stream`."""
    description = f"The answer. With `stream`, events that each hold a `{chunk}` or an `ErrorAnswer`, then `[DONE]`."
    events = {"schema": {"type": "string"}}
    return {200: {"description": description, "content": {"text/event-stream": events}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document of an application, made once."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=metadata.version("holdback"), summary=app.summary, routes=app.routes
        )
        kinds = (CompletionRequest, ChatCompletionRequest)
        _, schemas = models_json_schema(
            [*((kind, "validation") for kind in kinds), (ChatCompletionChunk, "serialization")], ref_template=REF
        )
        document["components"]["schemas"] |= schemas["$defs"]
        app.openapi_schema = document
    return app.openapi_schema
