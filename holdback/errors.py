"""Every exception that Holdback raises on purpose, and the stable reasons that clients may match on.

    HoldbackError
    ├── UnauthenticatedError      no API key, or none that is known
    ├── InvalidArgumentError      the request is wrong; sending it again will not help
    ├── NotFoundError             no such model or request
    ├── AlreadyExistsError        the id is in use
    ├── FailedPreconditionError   the two sides do not fit each other
    │   └── ConfigError           a process cannot start as configured
    ├── ResourceExhaustedError    full; try again after `retry_after_s`
    ├── DeadlineExceededError     the caller's deadline passed, or cannot be met
    ├── UnavailableError          nothing is there to serve it now; try again
    ├── RequestAbortedError       ended by an abort or by a newer generation of the same request
    └── InternalError             a fault of ours or of the device

`rpc` maps the tree to gRPC statuses and back, in one table; a test fails on a class that is not in it.
"""

from __future__ import annotations

import enum
from typing import ClassVar


class ErrorReason(enum.Enum):
    """Stable machine-readable reasons; they travel as `ErrorReason` of errors.proto under the same names."""

    INVALID_FIELD = "INVALID_FIELD"
    PROMPT_EMPTY = "PROMPT_EMPTY"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    TOKEN_OUT_OF_VOCABULARY = "TOKEN_OUT_OF_VOCABULARY"  # noqa: S105 - a token of text, no password
    CHAT_TEMPLATE_FAILED = "CHAT_TEMPLATE_FAILED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    PROTOCOL_MISMATCH = "PROTOCOL_MISMATCH"
    MODEL_MISMATCH = "MODEL_MISMATCH"
    LEASE_MISMATCH = "LEASE_MISMATCH"
    ADDRESS_NOT_ALLOWED = "ADDRESS_NOT_ALLOWED"
    STEP_OUT_OF_ORDER = "STEP_OUT_OF_ORDER"
    CONFIG_INVALID = "CONFIG_INVALID"
    QUEUE_FULL = "QUEUE_FULL"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    QUEUE_LONGER_THAN_DEADLINE = "QUEUE_LONGER_THAN_DEADLINE"
    NO_EXECUTOR = "NO_EXECUTOR"
    NO_SCHEDULER = "NO_SCHEDULER"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    ABORTED = "ABORTED"
    REPLACED_BY_NEWER_GENERATION = "REPLACED_BY_NEWER_GENERATION"
    TOO_MANY_MOVES = "TOO_MANY_MOVES"
    NUMERIC_ERROR = "NUMERIC_ERROR"
    INTERNAL = "INTERNAL"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    KEY_LIMIT = "KEY_LIMIT"
    PEER_GONE = "PEER_GONE"
    PEER_SILENT = "PEER_SILENT"
    PEER_STALLED = "PEER_STALLED"
    STREAM_REPLACED = "STREAM_REPLACED"


class HoldbackError(Exception):
    """Base of all. `message` is for people; `reason` is for programs.

    Texts of an error may come from anywhere; what UTF-8 cannot write of them is escaped, so that they can be sent.
    """

    default_reason: ClassVar[ErrorReason] = ErrorReason.INTERNAL

    def __init__(self, message: str, *, reason: ErrorReason | None = None) -> None:
        self.message = _escape(message)
        super().__init__(self.message)
        self.reason = reason if reason is not None else self.default_reason


class UnauthenticatedError(HoldbackError):
    default_reason = ErrorReason.UNAUTHENTICATED


class InvalidArgumentError(HoldbackError):
    """A field of a request is wrong.

    Attributes:
        field: path of the field as the caller wrote it, for example `sampling.top_p`.
        value: what was sent, shortened for people.
        limit: what is allowed, in words, for example `(0, 1]`.
    """

    default_reason = ErrorReason.INVALID_FIELD

    def __init__(
        self, message: str, *, field: str = "", value: str = "", limit: str = "", reason: ErrorReason | None = None
    ) -> None:
        super().__init__(message, reason=reason)
        self.field = _escape(field)
        self.value = _escape(value)
        self.limit = _escape(limit)

    @classmethod
    def of(cls, field: str, value: object, limit: str, *, reason: ErrorReason | None = None) -> InvalidArgumentError:
        """The usual sentence: `top_p is 1.5; allowed: [0, 1]`. Long values are cut to 100 characters."""
        shown = repr(value) if isinstance(value, str) else str(value)
        if len(shown) > 100:
            shown = shown[:97] + "..."
        return cls(f"{field} is {shown}; allowed: {limit}", field=field, value=shown, limit=limit, reason=reason)


class NotFoundError(HoldbackError):
    default_reason = ErrorReason.MODEL_NOT_FOUND


class AlreadyExistsError(HoldbackError):
    default_reason = ErrorReason.REQUEST_ID_IN_USE


class FailedPreconditionError(HoldbackError):
    default_reason = ErrorReason.MODEL_MISMATCH


class ConfigError(FailedPreconditionError):
    """A process cannot start as configured; the command line prints the message and exits with 2."""

    default_reason = ErrorReason.CONFIG_INVALID


class ResourceExhaustedError(HoldbackError):
    """Full now. `retry_after_s` is an estimate of when it is worth trying again."""

    default_reason = ErrorReason.QUEUE_FULL

    def __init__(self, message: str, *, retry_after_s: float = 1.0, reason: ErrorReason | None = None) -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class DeadlineExceededError(HoldbackError):
    default_reason = ErrorReason.DEADLINE_EXCEEDED


class UnavailableError(HoldbackError):
    default_reason = ErrorReason.PEER_GONE


class RequestAbortedError(HoldbackError):
    default_reason = ErrorReason.ABORTED


class InternalError(HoldbackError):
    default_reason = ErrorReason.INTERNAL


def _escape(text: str) -> str:
    """The halves of surrogate pairs that stand alone, as their escapes."""
    return text.encode(errors="backslashreplace").decode()
