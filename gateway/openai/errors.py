"""Exceptions as OpenAI writes errors: one table, a test fails on a class that is not in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from holdback.errors import (
    AlreadyExistsError,
    ConfigError,
    DeadlineExceededError,
    ErrorReason,
    FailedPreconditionError,
    HoldbackError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    RequestAbortedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)

CLIENT_CLOSED = 499
"""Nobody is there to read the answer. Unofficial but customary; OpenAI's own client does not try such a call again."""

UNAVAILABLE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Kind:
    """How a class of errors is told: HTTP status, and `type` of the error object."""

    status: int
    type: str


INVALID_REQUEST = "invalid_request_error"

KINDS: dict[type[HoldbackError], Kind] = {
    UnauthenticatedError: Kind(401, "authentication_error"),
    InvalidArgumentError: Kind(400, INVALID_REQUEST),
    NotFoundError: Kind(404, INVALID_REQUEST),
    AlreadyExistsError: Kind(409, INVALID_REQUEST),
    FailedPreconditionError: Kind(503, "server_error"),
    ConfigError: Kind(500, "server_error"),
    ResourceExhaustedError: Kind(429, "rate_limit_error"),
    DeadlineExceededError: Kind(504, "server_error"),
    UnavailableError: Kind(503, "server_error"),
    RequestAbortedError: Kind(CLIENT_CLOSED, INVALID_REQUEST),
    InternalError: Kind(500, "server_error"),
}

CODES = {
    ErrorReason.PROMPT_TOO_LONG: "context_length_exceeded",
    ErrorReason.UNAUTHENTICATED: "invalid_api_key",
}
"""Codes that OpenAI's clients know. Every other reason is its own name in small letters."""


class BodyError(Exception):
    """The request could not be read as far as its fields.

    Attributes:
        status: of the response.
        message: for people.
        code: for programs.
        retry_after_s: when to try again; None where that does not help.
    """

    def __init__(self, status: int, message: str, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s


def error_object(error: HoldbackError) -> dict[str, Any]:
    """What stands under `error` in a response or an event."""
    return {
        "message": error.message,
        "type": KINDS[type(error)].type,
        "param": error.field or None if isinstance(error, InvalidArgumentError) else _param_of(error),
        "code": CODES.get(error.reason, error.reason.value.lower()),
    }


def error_response(error: HoldbackError) -> JSONResponse:
    """A complete response."""
    headers = {}
    if isinstance(error, ResourceExhaustedError):
        headers = retry_after(error.retry_after_s)
    elif isinstance(error, UnavailableError):
        headers = retry_after(UNAVAILABLE_RETRY_S)
    elif isinstance(error, UnauthenticatedError):
        headers = {"WWW-Authenticate": "Bearer"}
    return JSONResponse({"error": error_object(error)}, KINDS[type(error)].status, headers)


def plain_error_response(
    status: int, message: str, code: str | None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """A response for what HTTP itself refuses."""
    kind = INVALID_REQUEST if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}, status, headers or {}
    )


def _param_of(error: HoldbackError) -> str | None:
    return "model" if error.reason is ErrorReason.MODEL_NOT_FOUND else None


def retry_after(seconds: float) -> dict[str, str]:
    """In whole seconds as HTTP has it, and in milliseconds for OpenAI's clients, which look for those first."""
    return {"Retry-After": str(max(1, math.ceil(seconds))), "Retry-After-Ms": str(max(1, math.ceil(seconds * 1000)))}
