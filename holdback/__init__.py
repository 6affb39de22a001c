"""Holdback: large language models on AWS Neuron devices, served as gRPC microservices.

The public names of the SDK are here; each is loaded when it is first used, so that `import holdback` alone, and the
parts that only need `holdback.types`, load no gRPC.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdback.client import (
        AsyncClient,
        Choice,
        GenerateOptions,
        Generation,
        GenerationStream,
        Model,
        Piece,
    )
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
        UnavailableError,
    )
    from holdback.types import FinishReason, ModelInfo, TokenLogprobs, Usage

__all__ = [
    "AlreadyExistsError",
    "AsyncClient",
    "Choice",
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
    "TokenLogprobs",
    "UnavailableError",
    "Usage",
]

_IN_CLIENT = frozenset({"AsyncClient", "Choice", "GenerateOptions", "Generation", "GenerationStream", "Model", "Piece"})
_IN_TYPES = frozenset({"FinishReason", "ModelInfo", "TokenLogprobs", "Usage"})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "client" if name in _IN_CLIENT else "types" if name in _IN_TYPES else "errors"
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
