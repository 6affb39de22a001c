"""Whether this executor's model is the pool's, asked before seconds or minutes go into loading it.

The registration checks the same at the end; so whatever cannot be asked or known yet is left to it.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from functools import partial

import grpc.aio
import structlog

from executor_svc.config import ExecutorConfig
from executor_svc.devices import expected_model, loads_model
from holdback import rpc
from holdback.codec import decode_model_info
from holdback.errors import ErrorReason, FailedPreconditionError
from holdback.types import ModelInfo
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc

log = structlog.get_logger(__name__)

TIMEOUT_S = 5.0
"""For a scheduler that is there; one that is not yet is waited for when the model is loaded."""

NOT_COMPARED = ("name",)


async def check_pool(config: ExecutorConfig) -> None:
    """Compares the model of the configuration with the pool's, as far as both are known.

    Raises:
        ConfigError: the directory is no model.
        FailedPreconditionError: it is another model; names the field and both values.
    """
    if not loads_model(config):
        return
    pool = await _ask(config)
    if pool is None:
        return
    ours = await asyncio.to_thread(partial(expected_model, config))
    if ours is not None:
        compare(ours, pool)


def compare(ours: ModelInfo, pool: ModelInfo) -> None:
    """Raises FailedPreconditionError for the first field that differs."""
    theirs = asdict(pool)
    for name, value in asdict(ours).items():
        if name not in NOT_COMPARED and value != theirs[name]:
            raise FailedPreconditionError(
                f"model.{name} is {value!r}; allowed: {theirs[name]!r}, that of the pool",
                reason=ErrorReason.MODEL_MISMATCH,
            )


async def _ask(config: ExecutorConfig) -> ModelInfo | None:
    """The pool's model; None when no scheduler answers, or it knows none yet."""
    request = scheduler_pb2.GetStateRequest(max_steps=1, without_rows=True)
    try:
        async with rpc.create_channel(config.scheduler_target, config.tls) as channel:
            state = await scheduler_pb2_grpc.SchedulerServiceStub(channel).GetState(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        log.info("pool_not_asked", scheduler=config.scheduler_target, reason=error.details())
        return None
    return decode_model_info(state.pool.model) if state.pool.HasField("model") else None
