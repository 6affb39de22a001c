"""Holdback: large language models on AWS Neuron devices, served as gRPC microservices.

The public names of the SDK are here; each is loaded when it is first used, so that `import holdback` alone, and the
parts that only need `holdback.types`, load no gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdback.answers import Choice, Generation, Model, Piece
    from holdback.client import AsyncClient
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
    from holdback.options import ChatOptions, GenerateOptions
    from holdback.streaming import GenerationStream
    from holdback.sync_client import Client, SyncGenerationStream
    from holdback.tls import Tls
    from holdback.types import FinishReason, ModelInfo, TokenLogprobs, Usage

__all__ = [
    "AlreadyExistsError",
    "AsyncClient",
    "ChatOptions",
    "Choice",
    "Client",
    "ConfigError",
    "DeadlineExceededError",
    "ErrorReason",
    "FailedPreconditionError",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "GenerationStream",
    "HoldbackError",
    "InternalError",
    "InvalidArgumentError",
    "Model",
    "ModelInfo",
    "NotFoundError",
    "Piece",
    "RequestAbortedError",
    "ResourceExhaustedError",
    "SyncGenerationStream",
    "Tls",
    "TokenLogprobs",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]

_MODULES = {
    "answers": ("Choice", "Generation", "Model", "Piece"),
    "client": ("AsyncClient",),
    "options": ("ChatOptions", "GenerateOptions"),
    "streaming": ("GenerationStream",),
    "sync_client": ("Client", "SyncGenerationStream"),
    "tls": ("Tls",),
    "types": ("FinishReason", "ModelInfo", "TokenLogprobs", "Usage"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'errors')}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
