"""What the engine protocol of vLLM says of model, server, load, tokenizer and health, and of which model."""

from __future__ import annotations

import asyncio
import hashlib
import io
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from gateway.server import GatewayServer
from holdback import rpc
from holdback.errors import ConfigError
from holdback.v1 import scheduler_pb2
from tests.gateway.scripted_scheduler import MODEL, ScriptedScheduler
from tests.gateway.vllm_calls import EOS, failure, read_all, request, violated_field

pytestmark = pytest.mark.loopback


async def test_model_and_server_are_described(
    stub: Any, scheduler: ScriptedScheduler, gateway: GatewayServer, directory: pathlib.Path
) -> None:
    (directory / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    info = await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60)
    assert (info.model_path, info.served_model_name, info.is_generation) == ("toy", "toy", True)
    assert (info.vocab_size, info.max_context_length, info.max_req_input_len) == (512, 64, 63)
    assert (list(info.eos_token_ids), info.supports_vision) == ([EOS], False)
    assert (info.model_type, list(info.architectures)) == ("llama", ["LlamaForCausalLM"])
    assert info.tokenizer_path == str(directory)
    scheduler.load = scheduler_pb2.GetLoadResponse(num_slots=4)
    server = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
    assert (server.server_type, server.data_parallel_size, server.max_num_seqs) == ("holdback", 1, 4)
    assert server.active_requests == 0


async def test_the_load_is_that_of_the_pool(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.load = scheduler_pb2.GetLoadResponse(
        num_running=3,
        num_waiting=2,
        num_waiting_tokens=500,
        num_slots=4,
        kv_usage=0.5,
        prefix_cache_queries=100,
        prefix_cache_hits=25,
    )
    response = await stub.GetLoads(pb.GetLoadsRequest(), timeout=60)
    assert response.dp_rank_count == 1
    (load,) = response.loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 2, 5)
    assert (load.num_waiting_uncached_tokens, load.max_running_requests) == (500, 4)
    assert (load.token_usage, load.utilization, load.cache_hit_rate) == (0.5, 0.5, 0.25)
    error = await failure(stub.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=60))
    assert (error.code(), violated_field(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "dp_rank")


async def test_the_load_of_a_scheduler_that_is_away_is_unavailable(stub: Any, scheduler: ScriptedScheduler) -> None:
    await scheduler.stop()
    error = await failure(stub.GetLoads(pb.GetLoadsRequest(), timeout=60))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_tokenizer_comes_as_an_archive_with_its_digest(stub: Any, directory: pathlib.Path) -> None:
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "vocab.json").write_bytes(bytes(range(256)) * 1000)

    async def fetch() -> tuple[bytes, list[common_pb2.GetTokenizerChunk]]:
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=60)]
        return b"".join(chunk.data for chunk in chunks), chunks

    content, chunks = await fetch()
    assert all(0 < len(chunk.data) <= 64 * 1024 for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(content).hexdigest()]
    archive = zipfile.ZipFile(io.BytesIO(content))
    assert set(archive.namelist()) == {"tokenizer.json", "tokenizer_config.json", "vocab.json"}
    assert archive.read("tokenizer.json") == (directory / "tokenizer.json").read_bytes()
    assert (await fetch())[0] == content


async def test_a_tokenizer_that_is_gone_is_said_to_be_and_no_empty_archive(stub: Any, directory: pathlib.Path) -> None:
    content = (directory / "tokenizer.json").read_bytes()
    (directory / "tokenizer.json").unlink()
    error = await failure(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=60))
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INTERNAL,
        "the tokenizer's folder has no tokenizer.json any more",
    )
    (directory / "tokenizer.json").write_bytes(content)
    assert await read_all(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=60))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Embed", pb.EmbedRequest()),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()),
    ],
)
async def test_what_is_not_served_says_so(stub: Any, method: str, message: Any) -> None:
    error = await failure(getattr(stub, method)(message, timeout=60))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert method in (error.details() or "")


@pytest.mark.case("B59")
async def test_health_is_whether_a_request_would_be_served_now(
    stub: Any, scheduler: ScriptedScheduler, gateway: GatewayServer
) -> None:
    assert (await stub.HealthCheck(pb.HealthCheckRequest(), timeout=60)).healthy
    (pool,) = gateway.pools
    next_change = pool.engine.next_change
    scheduler.set_model(MODEL, ready=False)
    await asyncio.wait_for(next_change.wait(), 60)
    assert not (await stub.HealthCheck(pb.HealthCheckRequest(), timeout=60)).healthy


async def test_a_model_that_is_not_known_yet_is_unavailable_and_unhealthy(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler
) -> None:
    scheduler.model = None
    gateway = await make_gateway(scheduler=scheduler.target)
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        error = await failure(stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        health = await stub.HealthCheck(pb.HealthCheckRequest(), timeout=60)
        assert not health.healthy
        assert health.message


# ---- several pools ----


def two_pools(scheduler: ScriptedScheduler, directory: pathlib.Path) -> list[dict[str, Any]]:
    return [
        {"served_model_names": [name, f"{name}-alias"], "scheduler": scheduler.target, "tokenizer": directory}
        for name in ("one", "two")
    ]


async def test_of_several_models_the_chosen_one_is_served(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler, directory: pathlib.Path
) -> None:
    gateway = await make_gateway(pools=two_pools(scheduler, directory), vllm_engine_model="two-alias")
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        for pool in gateway.pools:
            await pool.wait_for_model()
        info = await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60)
    assert info.served_model_name == "two"


async def test_of_several_models_none_is_guessed(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler, directory: pathlib.Path
) -> None:
    gateway = await make_gateway(pools=two_pools(scheduler, directory))
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        error = await failure(stub.Generate(request(), timeout=60))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "vllm_engine_model is not set" in (error.details() or "")


async def test_a_chosen_model_that_is_not_served_is_refused_at_the_start(make_gateway: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"vllm_engine_model is 'other'; allowed: a model of this gateway.*toy"):
        await make_gateway(scheduler="127.0.0.1:1", vllm_engine_model="other")
