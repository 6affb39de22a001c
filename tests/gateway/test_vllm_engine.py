"""The engine protocol of vLLM over real gRPC, before a scripted scheduler: what SMG sends, and what it counts on."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from gateway.server import GatewayServer
from holdback import rpc
from holdback.errors import ConfigError, ResourceExhaustedError
from holdback.types import FinishReason, TokenLogprobs
from holdback.v1 import scheduler_pb2
from tests.gateway.scripted_scheduler import MODEL, ScriptedScheduler
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer

pytestmark = pytest.mark.loopback

EOS = 2
PROMPT = [70, 71, 72]


def ids_of(text: str) -> list[int]:
    return byte_ids(make_tokenizer("byte_level"), text.encode())


@pytest.fixture
async def stub(gateway: GatewayServer) -> AsyncIterator[Any]:
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def request(stream: bool = False, **params: Any) -> pb.GenerateRequest:
    """A request as SMG builds it: token ids, and the parameters of its own defaults."""
    defaults: dict[str, Any] = {"top_p": 1.0, "repetition_penalty": 1.0, "skip_special_tokens": True, "n": 1}
    return pb.GenerateRequest(
        request_id="smg-1",
        tokenized=pb.TokenizedInput(original_text="as sent", input_ids=PROMPT),
        sampling_params=pb.SamplingParams(**(defaults | params)),
        stream=stream,
    )


async def answers(stub: Any, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return await read_all(stub.Generate(message, timeout=20))


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """How a call fails; of a stream everything is read."""
    is_stream = isinstance(call, grpc.aio.UnaryStreamCall)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (read_all(call) if is_stream else call)
    return caught.value


async def read_all(call: Any) -> list[Any]:
    return [response async for response in call]


def violated_field(error: grpc.aio.AioRpcError) -> str:
    (value,) = [value for key, value in error.trailing_metadata() or () if key == rpc.STATUS_DETAILS_KEY]
    assert isinstance(value, bytes)
    bad = error_details_pb2.BadRequest()
    for detail in status_pb2.Status.FromString(value).details:
        if detail.Is(bad.DESCRIPTOR):
            detail.Unpack(bad)
    (violation,) = bad.field_violations
    return str(violation.field)


# ---- answers ----


async def test_an_answer_in_one_piece_has_all_tokens_the_reason_and_the_counts(
    stub: Any, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [*ids_of("yes"), EOS]
    (response,) = await answers(stub, request())
    complete = response.complete
    assert list(complete.output_ids) == scheduler.answer
    assert (complete.finish_reason, complete.index) == ("stop", 0)
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 4, 0)
    assert complete.WhichOneof("matched_stop") is None
    assert not complete.HasField("output_logprobs")
    add = await scheduler.next_add()
    assert list(add.spec.prompt_token_ids) == PROMPT
    assert add.spec.request_id == "smg-1"


async def test_a_stream_has_what_is_new_in_each_chunk_and_everything_in_the_last_message(
    stub: Any, scheduler: ScriptedScheduler
) -> None:
    call = stub.Generate(request(stream=True), timeout=20)
    add = await scheduler.next_add()
    scheduler.started(add.handle, num_cached_tokens=2)
    chunks = []
    for index, token_ids in [(0, [80, 81]), (2, [82]), (3, [EOS])]:
        scheduler.tokens(add.handle, index, token_ids)
        chunks.append((await call.read()).chunk)
    assert [list(chunk.token_ids) for chunk in chunks] == [[80, 81], [82], [EOS]]
    assert [chunk.completion_tokens for chunk in chunks] == [2, 1, 1]
    assert {(chunk.prompt_tokens, chunk.cached_tokens) for chunk in chunks} == {(3, 2)}
    complete = (await call.read()).complete
    assert list(complete.output_ids) == [80, 81, 82, EOS]
    assert (complete.finish_reason, complete.completion_tokens, complete.cached_tokens) == ("stop", 4, 2)
    assert await call.read() is grpc.aio.EOF


async def test_the_reasons_are_those_of_vllm_and_say_what_stopped(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [*ids_of("one two")]
    (response,) = await answers(stub, request(max_tokens=3))
    assert (response.complete.finish_reason, response.complete.completion_tokens) == ("length", 3)
    (response,) = await answers(stub, request(stop=["e t"]))
    assert (response.complete.finish_reason, response.complete.matched_stop_str) == ("stop", "e t")
    assert list(response.complete.output_ids) == ids_of("one t")
    (response,) = await answers(stub, request(stop_token_ids=ids_of("n")))
    assert (response.complete.finish_reason, response.complete.matched_token_id) == ("stop", ids_of("n")[0])


async def test_text_is_tokenized_as_everywhere(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    (response,) = await answers(stub, pb.GenerateRequest(text="Hello world"))
    expected = make_tokenizer("byte_level").encode("Hello world").ids
    assert list((await scheduler.next_add()).spec.prompt_token_ids) == expected
    assert response.complete.prompt_tokens == len(expected)


async def test_each_of_n_choices_has_chunks_and_an_end_of_its_own(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [90, EOS]
    responses = await answers(stub, request(stream=True, n=2))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    ends = []
    for response in responses:
        if response.HasField("chunk"):
            tokens[response.chunk.index] += response.chunk.token_ids
        else:
            ends.append((response.complete.index, list(response.complete.output_ids), response.complete.prompt_tokens))
    assert tokens == {0: [90, EOS], 1: [90, EOS]}
    assert sorted(ends) == [(0, [90, EOS], 3), (1, [90, EOS], 3)]


@pytest.mark.case("B48")
@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_parallel_to_the_tokens(
    stub: Any, scheduler: ScriptedScheduler, stream: bool
) -> None:
    call = stub.Generate(request(stream=stream, logprobs=2), timeout=20)
    add = await scheduler.next_add()
    assert add.spec.sampling.num_logprobs == 2
    sent = [TokenLogprobs(80, -0.5, (80, 81), (-0.5, -1.5)), TokenLogprobs(EOS, -0.25, (EOS, 80), (-0.25, -2.0))]
    scheduler.tokens(add.handle, 0, [80, EOS], sent)
    response = await call.read()
    logprobs = response.chunk.output_logprobs if stream else response.complete.output_logprobs
    assert list(logprobs.token_ids) == [80, EOS]
    assert list(logprobs.token_logprobs) == [-0.5, -0.25]
    assert [(list(top.token_ids), list(top.values)) for top in logprobs.top_logprobs] == [
        ([80, 81], [-0.5, -1.5]),
        ([EOS, 80], [-0.25, -2.0]),
    ]
    if stream:  # the reader has added them up, and would count them twice
        assert not (await call.read()).complete.HasField("output_logprobs")


# ---- parameters ----


async def test_every_parameter_arrives(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    await answers(
        stub,
        request(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.5,
            max_tokens=9,
            min_tokens=1,
            stop_token_ids=[5],
            ignore_eos=True,
            seed=-3,
            logit_bias={4: 1.5},
        ),
    )
    sampling = (await scheduler.next_add()).spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 7, 0.125)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos, sampling.seed) == (9, 1, True, -3)
    assert list(sampling.stop_token_ids) == [5]
    assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(4, 1.5)]
    assert not sampling.HasField("num_logprobs")


async def test_zero_is_unset_as_with_vllm_except_in_temperature(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    bare = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=PROMPT))
    await answers(stub, bare)
    sampling = (await scheduler.next_add()).spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)
    assert sampling.top_k in (0, -1)
    assert sampling.max_tokens == scheduler.default_max_tokens
    bare.sampling_params.temperature = 0.0
    await answers(stub, bare)
    assert (await scheduler.next_add()).spec.sampling.temperature == 0.0


async def test_what_only_text_needs_changes_nothing(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [*ids_of("abc"), EOS]
    params: dict[str, Any] = {"spaces_between_special_tokens": True, "include_stop_str_in_output": True, "stop": ["b"]}
    (response,) = await answers(stub, request(**params))
    assert list(response.complete.output_ids) == ids_of("ab")


UNSUPPORTED = [
    ("sampling_params.prompt_logprobs", {"prompt_logprobs": 1}),
    ("sampling_params.truncate_prompt_tokens", {"truncate_prompt_tokens": -1}),
    ("sampling_params.json_schema", {"json_schema": "{}"}),
    ("sampling_params.regex", {"regex": "a"}),
    ("sampling_params.grammar", {"grammar": "a"}),
    ("sampling_params.structural_tag", {"structural_tag": "a"}),
    ("sampling_params.json_object", {"json_object": True}),
    ("sampling_params.choice", {"choice": pb.ChoiceConstraint(choices=["a"])}),
]
UNSUPPORTED_BESIDE = [
    ("kv_transfer_params", {"kv_transfer_params": pb.KvTransferParams(remote_host="x")}),
    ("kv_transfer_params_json", {"kv_transfer_params_json": "{}"}),
    ("mm_inputs", {"mm_inputs": pb.MultimodalInputs()}),
    ("extra_mm_inputs", {"extra_mm_inputs": [pb.MultimodalInputs()]}),
    ("media_refs", {"media_refs": pb.MediaRefs(items=[pb.MediaRef(url="http://169.254.169.254/")])}),
    ("data_parallel_rank", {"data_parallel_rank": 1}),
]


@pytest.mark.case("B74", "B75")
@pytest.mark.parametrize(("field", "params"), UNSUPPORTED)
async def test_a_parameter_that_is_not_supported_is_refused_by_name(
    stub: Any, scheduler: ScriptedScheduler, field: str, params: dict[str, Any]
) -> None:
    error = await failure(stub.Generate(request(**params), timeout=20))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in (error.details() or "")
    assert violated_field(error) == field
    assert scheduler.adds.empty()


@pytest.mark.case("B74")
@pytest.mark.parametrize(("field", "fields"), UNSUPPORTED_BESIDE)
async def test_an_input_that_is_not_supported_is_refused_by_name(
    stub: Any, scheduler: ScriptedScheduler, field: str, fields: dict[str, Any]
) -> None:
    message = request()
    message.MergeFrom(pb.GenerateRequest(**fields))
    error = await failure(stub.Generate(message, timeout=20))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(error) == field
    assert scheduler.adds.empty()


async def test_rank_zero_is_the_only_one(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    message = request()
    message.data_parallel_rank = 0
    (response,) = await answers(stub, message)
    assert response.complete.finish_reason == "stop"


@pytest.mark.case("B30", "B35", "B70")
@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1.0}, "sampling_params.temperature"),
        ({"top_p": 1.5}, "sampling_params.top_p"),
        ({"logprobs": 21}, "sampling_params.logprobs"),
        ({"logprobs": -1}, "sampling_params.logprobs"),
        ({"max_tokens": 0}, "sampling_params.max_tokens"),
        ({"n": 129}, "sampling_params.n"),
        ({"stop": [""]}, "sampling_params.stop[0]"),
        ({"stop": ["x"] * 17}, "sampling_params.stop"),
        ({"stop_token_ids": [1, 512]}, "sampling_params.stop_token_ids[1]"),
        ({"logit_bias": {-1: 1.0}}, "sampling_params.logit_bias"),
        ({"logit_bias": {1: 101.0}}, "sampling_params.logit_bias[0].bias"),
    ],
)
async def test_a_value_out_of_range_is_refused_under_the_name_it_was_sent_by(
    stub: Any, params: dict[str, Any], field: str
) -> None:
    error = await failure(stub.Generate(request(**params), timeout=20))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert violated_field(error) == field
    assert (error.details() or "").startswith(field)


async def test_token_ids_are_named_as_they_were_sent(stub: Any) -> None:
    message = request()
    message.tokenized.input_ids.append(512)
    error = await failure(stub.Generate(message, timeout=20))
    assert violated_field(error) == "tokenized.input_ids[3]"
    error = await failure(stub.Generate(pb.GenerateRequest(), timeout=20))
    assert (error.code(), violated_field(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "input")


async def test_a_huge_top_k_keeps_all_tokens(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    await answers(stub, request(top_k=2**32 - 1))
    assert (await scheduler.next_add()).spec.sampling.top_k == 2**31 - 1


# ---- endings ----


@pytest.mark.case("B56")
async def test_a_call_that_is_cancelled_is_aborted_at_the_scheduler(stub: Any, scheduler: ScriptedScheduler) -> None:
    call = stub.Generate(request(stream=True), timeout=20)
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, [80])
    assert list((await call.read()).chunk.token_ids) == [80]
    call.cancel()
    assert await scheduler.next_abort() == ("smg-1", 0)


async def test_an_abort_ends_its_request_and_leaves_unknown_ids_alone(stub: Any, scheduler: ScriptedScheduler) -> None:
    call = stub.Generate(request(), timeout=20)
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, [80])
    await stub.Abort(pb.AbortRequest(request_ids=["unknown"]), timeout=20)
    assert scheduler.aborts.empty()
    await stub.Abort(pb.AbortRequest(request_ids=["unknown", "smg-1"]), timeout=20)
    assert await scheduler.next_abort() == ("smg-1", 0)
    assert (await call.read()).complete.finish_reason == "abort"
    await stub.Abort(pb.AbortRequest(request_ids=["smg-1"]), timeout=20)


async def test_a_key_aborts_nothing_of_another_key(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    keys = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("one", "two")]
    (tmp_path / "keys.yaml").write_text(json.dumps({"keys": keys}))
    gateway = await make_gateway(scheduler=scheduler.target, api_keys=tmp_path / "keys.yaml")
    as_one, as_two = ([("authorization", f"Bearer {name}")] for name in ("one", "two"))
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        call = stub.Generate(request(), timeout=20, metadata=as_one)
        add = await scheduler.next_add()
        await stub.Abort(pb.AbortRequest(request_ids=["smg-1"]), timeout=20, metadata=as_two)
        assert scheduler.aborts.empty()
        scheduler.tokens(add.handle, 0, [EOS])
        assert (await call.read()).complete.finish_reason == "stop"
        error = await failure(stub.HealthCheck(pb.HealthCheckRequest(), timeout=20))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.case("B70")
async def test_more_ids_than_anybody_aborts_are_refused(stub: Any) -> None:
    error = await failure(stub.Abort(pb.AbortRequest(request_ids=["x"] * 1025), timeout=20))
    assert (error.code(), violated_field(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "request_ids")


@pytest.mark.case("B17")
async def test_a_living_id_is_refused_whatever_protocol_it_came_by(stub: Any, scheduler: ScriptedScheduler) -> None:
    first = stub.Generate(request(), timeout=20)
    add = await scheduler.next_add()
    error = await failure(stub.Generate(request(), timeout=20))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    scheduler.tokens(add.handle, 0, [EOS])
    assert (await first.read()).complete.finish_reason == "stop"


async def test_a_request_that_fails_ends_with_its_status_and_no_complete(
    stub: Any, scheduler: ScriptedScheduler
) -> None:
    call = stub.Generate(request(stream=True), timeout=20)
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, [80])
    assert (await call.read()).HasField("chunk")
    full = ResourceExhaustedError("10000 requests wait; allowed: 10000", retry_after_s=3)
    scheduler.ended(add.handle, FinishReason.ERROR, error=full)
    error = await failure(call.read())
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, full.message)


async def test_the_deadline_is_carried_to_the_scheduler(stub: Any, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    await answers(stub, request())
    assert 15_000 < (await scheduler.next_add()).spec.deadline_ms <= 20_000


# ---- what it says of itself ----


async def test_model_and_server_are_described(
    stub: Any, scheduler: ScriptedScheduler, gateway: GatewayServer, directory: pathlib.Path
) -> None:
    (directory / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    info = await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20)
    assert (info.model_path, info.served_model_name, info.is_generation) == ("toy", "toy", True)
    assert (info.vocab_size, info.max_context_length, info.max_req_input_len) == (512, 64, 63)
    assert (list(info.eos_token_ids), info.supports_vision) == ([EOS], False)
    assert (info.model_type, list(info.architectures)) == ("llama", ["LlamaForCausalLM"])
    assert info.tokenizer_path == str(directory)
    scheduler.load = scheduler_pb2.GetLoadResponse(num_slots=4)
    server = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)
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
    response = await stub.GetLoads(pb.GetLoadsRequest(), timeout=20)
    assert response.dp_rank_count == 1
    (load,) = response.loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 2, 5)
    assert (load.num_waiting_uncached_tokens, load.max_running_requests) == (500, 4)
    assert (load.token_usage, load.utilization, load.cache_hit_rate) == (0.5, 0.5, 0.25)
    error = await failure(stub.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=20))
    assert (error.code(), violated_field(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "dp_rank")


async def test_the_load_of_a_scheduler_that_is_away_is_unavailable(stub: Any, scheduler: ScriptedScheduler) -> None:
    await scheduler.stop()
    error = await failure(stub.GetLoads(pb.GetLoadsRequest(), timeout=20))
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_tokenizer_comes_as_an_archive_with_its_digest(stub: Any, directory: pathlib.Path) -> None:
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "vocab.json").write_bytes(bytes(range(256)) * 1000)

    async def fetch() -> tuple[bytes, list[common_pb2.GetTokenizerChunk]]:
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=20)]
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
    error = await failure(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=20))
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INTERNAL,
        "the tokenizer's folder has no tokenizer.json any more",
    )
    (directory / "tokenizer.json").write_bytes(content)
    assert await read_all(stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=20))


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
    error = await failure(getattr(stub, method)(message, timeout=20))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert method in (error.details() or "")


@pytest.mark.case("B59")
async def test_health_is_whether_a_request_would_be_served_now(
    stub: Any, scheduler: ScriptedScheduler, gateway: GatewayServer
) -> None:
    assert (await stub.HealthCheck(pb.HealthCheckRequest(), timeout=20)).healthy
    (pool,) = gateway.pools
    next_change = pool.engine.next_change
    scheduler.set_model(MODEL, ready=False)
    await asyncio.wait_for(next_change.wait(), 10)
    assert not (await stub.HealthCheck(pb.HealthCheckRequest(), timeout=20)).healthy


async def test_a_model_that_is_not_known_yet_is_unavailable_and_unhealthy(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler
) -> None:
    scheduler.model = None
    gateway = await make_gateway(scheduler=scheduler.target)
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        error = await failure(stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        health = await stub.HealthCheck(pb.HealthCheckRequest(), timeout=20)
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
        info = await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20)
    assert info.served_model_name == "two"


async def test_of_several_models_none_is_guessed(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler, directory: pathlib.Path
) -> None:
    gateway = await make_gateway(pools=two_pools(scheduler, directory))
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        error = await failure(stub.Generate(request(), timeout=20))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert "vllm_engine_model is not set" in (error.details() or "")


async def test_a_chosen_model_that_is_not_served_is_refused_at_the_start(make_gateway: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"vllm_engine_model is 'other'; allowed: a model of this gateway.*toy"):
        await make_gateway(scheduler="127.0.0.1:1", vllm_engine_model="other")
