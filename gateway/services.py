"""Everything on the gateway's gRPC port: the services, the health of each, and reflection where it is asked for."""

from __future__ import annotations

import grpc.aio
from smg_grpc_proto import vllm_engine_pb2_grpc

from gateway.config import GatewayConfig
from gateway.generations import Generations
from gateway.inference import InferenceService
from gateway.pool import Pools
from gateway.vllm_engine.service import SERVICE_NAME as VLLM_ENGINE
from gateway.vllm_engine.service import ServedPool, VllmEngine
from gateway.vllm_engine.tokenizer_files import TokenizerFiles
from holdback.errors import ConfigError
from holdback.health import HEALTH, HealthServer
from holdback.v1 import inference_pb2, inference_pb2_grpc

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


class GrpcServices:
    """The services of one gateway. What their health says is what `report_health` said last."""

    def __init__(self, config: GatewayConfig, generations: Generations, health: HealthServer) -> None:
        """Raises ConfigError when `vllm_engine_model` names no model of this gateway."""
        self._with_reflection = config.reflection
        self._generations = generations
        self._health = health
        self._served = _choose_pool(config, generations.pools)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers everything with a server that has not started."""
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceService(self._generations), server)
        engine = VllmEngine(self._generations, self._served)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server)
        self._health.add_to(server)
        if self._with_reflection:
            _add_reflection(server)

    async def report_health(self, *, is_draining: bool) -> None:
        """A service is healthy when a request sent to it now would be served."""
        is_engine_ready = self._served is not None and self._served.pool.is_ready
        await self._health.set_ready(self._generations.pools.is_ready and not is_draining)
        await self._health.set_service(INFERENCE, self._generations.pools.is_ready and not is_draining)
        await self._health.set_service(VLLM_ENGINE, is_engine_ready and not is_draining)


def _choose_pool(config: GatewayConfig, pools: Pools) -> ServedPool | None:
    """What the engine protocol serves: the pool that the configuration names, else the only one."""
    name = config.vllm_engine_model
    for pool, source in zip(pools, config.all_pools(), strict=True):
        if name in pool.names or (not name and len(config.all_pools()) == 1):
            return ServedPool(pool, TokenizerFiles(source.tokenizer))
    if name:
        known = ", ".join(pool.names[0] for pool in pools)
        raise ConfigError(f"vllm_engine_model is {name!r}; allowed: a model of this gateway, which are {known}")
    return None


def _add_reflection(server: grpc.aio.Server) -> None:
    from grpc_reflection.v1alpha import reflection  # most gateways never need it

    names = (INFERENCE, VLLM_ENGINE, HEALTH, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
