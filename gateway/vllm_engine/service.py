"""`vllm.grpc.engine.VllmEngine` for one pool of the gateway.

Every request becomes a `Generation` and runs as all others do, so limits, ids, deadlines and endings are the same. The
protocol knows one model, so it serves one pool. What it does not serve answers UNIMPLEMENTED: embeddings, KV events,
profiles, and flushing the cache.
"""

from __future__ import annotations

import contextlib
import datetime
import pathlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from gateway.calls import Context, answering, current_caller, generating
from gateway.generations import Generations
from gateway.pool import Pool
from gateway.vllm_engine.requests import decode_request, name_as_sent
from gateway.vllm_engine.responses import Responses
from gateway.vllm_engine.tokenizer_files import TokenizerFiles
from holdback.errors import ErrorReason, InvalidArgumentError, NotFoundError, UnavailableError
from holdback.types import ModelInfo
from holdback.v1 import scheduler_pb2

SERVICE_NAME = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
MAX_ABORT_IDS = 1024
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ServedPool:
    """The pool that a service of one model serves, and the files of its tokenizer."""

    pool: Pool
    files: TokenizerFiles


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Serves one pool. `served` is None where several could be meant and none was chosen; then every call says so."""

    def __init__(self, generations: Generations, served: ServedPool | None) -> None:
        self._generations = generations
        self._served_pool = served
        self._version = metadata.version("holdback")
        self._started_at = time.monotonic()
        self._last_received_at = 0.0

    async def Generate(  # noqa: N802
        self, request: vllm_engine_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[vllm_engine_pb2.GenerateResponse]:
        self._last_received_at = time.time()
        counting = self._generations.counting_refusals
        async with _answering(context, counting):
            with counting():
                message = decode_request(request, self._served.pool.names[0])
            async with generating(self._generations, message, context, is_stream=request.stream) as run:
                responses = Responses(run, stream=request.stream)
                async for choice, delta in run.deltas():
                    for response in responses.add(choice, delta):
                        yield response

    async def Abort(  # noqa: N802
        self, request: vllm_engine_pb2.AbortRequest, context: Context
    ) -> vllm_engine_pb2.AbortResponse:
        """Ids that this gateway does not run, or not for this caller, are left alone and no error, as with vLLM: a
        router aborts whatever it lets go of, whether it has ended or not."""
        async with _answering(context):
            if len(request.request_ids) > MAX_ABORT_IDS:
                raise InvalidArgumentError.of("request_ids", f"{len(request.request_ids)} ids", f"[0, {MAX_ABORT_IDS}]")
            owner = current_caller().name
            for request_id in request.request_ids:
                with contextlib.suppress(NotFoundError):
                    self._generations.abort(request_id, owner)
            return vllm_engine_pb2.AbortResponse()

    async def HealthCheck(  # noqa: N802
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Healthy means: a request sent now would be served."""
        async with _answering(context):
            self._generations.check_open()
            pool = self._served.pool
            message = "" if pool.is_ready else pool.engine.status.not_ready_reason
            if pool.refusal is not None:
                message = pool.refusal.message
            return vllm_engine_pb2.HealthCheckResponse(healthy=pool.is_ready, message=message)

    async def GetModelInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """`tokenizer_path` is a folder of this machine, as vLLM sends it: SMG reads the tokenizer there if it has the
        same folder, and asks `GetTokenizer` if it has not. Without one it would ask nobody."""
        async with _answering(context):
            pool, files = self._served.pool, self._served.files
            return _model_info(pool, _known_model(pool), files.directory, await files.model_config())

    async def GetServerInfo(  # noqa: N802
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        async with _answering(context):
            load = await self._served.pool.engine.load.read()
            return vllm_engine_pb2.GetServerInfoResponse(
                active_requests=self._generations.num_running,
                last_receive_timestamp=self._last_received_at,
                uptime_seconds=time.monotonic() - self._started_at,
                server_type="holdback",
                data_parallel_size=1,
                max_num_seqs=_int32(load.num_slots),
            )

    async def GetLoads(  # noqa: N802
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """One rank: the whole pool, over all gateways."""
        async with _answering(context):
            if request.HasField("dp_rank") and request.dp_rank != 0:
                raise InvalidArgumentError.of("dp_rank", request.dp_rank, "0 or unset: there is one rank")
            reader = self._served.pool.engine.load
            load = await reader.read()
            return vllm_engine_pb2.GetLoadsResponse(
                timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
                version=self._version,
                dp_rank_count=1,
                loads=[_scheduler_load(load, reader.tokens_per_s)],
            )

    async def GetTokenizer(  # noqa: N802
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        async with _answering(context):
            for chunk in await self._served.files.chunks():
                yield chunk

    async def Embed(self, request: Any, context: Context) -> None:  # noqa: N802
        await _refuse(context, "Embed", "models here generate text")

    async def FlushCache(self, request: Any, context: Context) -> None:  # noqa: N802
        await _refuse(context, "FlushCache", "cached blocks are shared by all clients; use a cache salt")

    async def StartProfile(self, request: Any, context: Context) -> None:  # noqa: N802
        await _refuse(context, "StartProfile", "the scheduler's GetState has the timings of every step")

    async def StopProfile(self, request: Any, context: Context) -> None:  # noqa: N802
        await _refuse(context, "StopProfile", "the scheduler's GetState has the timings of every step")

    async def SubscribeKvEvents(self, request: Any, context: Context) -> None:  # noqa: N802
        await _refuse(context, "SubscribeKvEvents", "placement by prefix is the scheduler's; GetLoads has the load")

    @property
    def _served(self) -> ServedPool:
        if self._served_pool is None:
            known = ", ".join(pool.names[0] for pool in self._generations.pools)
            raise NotFoundError(f"vllm_engine_model is not set at this gateway of several models; allowed: {known}")
        return self._served_pool


@contextlib.asynccontextmanager
async def _answering(
    context: Context, counting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
) -> AsyncIterator[None]:
    async with answering(context, counting):
        try:
            yield
        except InvalidArgumentError as error:
            raise name_as_sent(error) from None


async def _refuse(context: Context, method: str, why: str) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served: {why}")


def _known_model(pool: Pool) -> ModelInfo:
    if pool.refusal is not None:
        raise pool.refusal
    model = pool.engine.status.model
    if model is None:
        why = f"the model is not known yet: {pool.engine.status.not_ready_reason}"
        raise UnavailableError(why, reason=ErrorReason.NO_EXECUTOR)
    return model


def _model_info(
    pool: Pool, model: ModelInfo, directory: pathlib.Path, config: dict[str, Any]
) -> vllm_engine_pb2.GetModelInfoResponse:
    tokenizer = pool.tokenizer
    model_type, architectures = config.get("model_type"), config.get("architectures")
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=pool.names[0],
        served_model_name=pool.names[0],
        tokenizer_path=str(directory.resolve()),
        is_generation=True,
        max_context_length=model.max_model_len,
        max_req_input_len=_int32(model.max_model_len - 1),
        vocab_size=model.vocab_size,
        model_type=model_type if isinstance(model_type, str) else "",
        architectures=[name for name in architectures if isinstance(name, str)]
        if isinstance(architectures, list)
        else [],
        eos_token_ids=[token_id for token_id in model.eos_token_ids if token_id <= INT32_MAX],
        bos_token_id=tokenizer.bos_token_id or 0,
        pad_token_id=tokenizer.id_of("pad_token") or 0,
    )


def _scheduler_load(load: scheduler_pb2.GetLoadResponse, tokens_per_s: float) -> vllm_engine_pb2.SchedulerLoad:
    queries = load.prefix_cache_queries
    return vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=_int32(load.num_running),
        num_waiting_reqs=_int32(load.num_waiting),
        num_total_reqs=_int32(load.num_running + load.num_waiting),
        token_usage=load.kv_usage,
        utilization=load.kv_usage,
        gen_throughput=tokens_per_s,
        cache_hit_rate=load.prefix_cache_hits / queries if queries else 0.0,
        max_running_requests=_int32(load.num_slots),
        num_waiting_uncached_tokens=_int32(load.num_waiting_tokens),
    )


def _int32(value: int) -> int:
    """A count in a field that holds no larger one."""
    return min(value, INT32_MAX)
