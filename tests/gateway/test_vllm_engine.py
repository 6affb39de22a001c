"""The answers of the engine protocol of vLLM over real gRPC, and how they end: what SMG counts on."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from holdback import rpc
from holdback.errors import ResourceExhaustedError
from holdback.types import FinishReason, TokenLogprobs
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.small_tokenizers import make_tokenizer
from tests.gateway.vllm_calls import EOS, PROMPT, answers, failure, ids_of, request, violated_field

pytestmark = pytest.mark.loopback


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
    call = stub.Generate(request(stream=True), timeout=60)
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
    call = stub.Generate(request(stream=stream, logprobs=2), timeout=60)
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


# ---- endings ----


@pytest.mark.case("B56")
async def test_a_call_that_is_cancelled_is_aborted_at_the_scheduler(stub: Any, scheduler: ScriptedScheduler) -> None:
    call = stub.Generate(request(stream=True), timeout=60)
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, [80])
    assert list((await call.read()).chunk.token_ids) == [80]
    call.cancel()
    assert await scheduler.next_abort() == ("smg-1", 0)


async def test_an_abort_ends_its_request_and_leaves_unknown_ids_alone(stub: Any, scheduler: ScriptedScheduler) -> None:
    call = stub.Generate(request(), timeout=60)
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, [80])
    await stub.Abort(pb.AbortRequest(request_ids=["unknown"]), timeout=60)
    assert scheduler.aborts.empty()
    await stub.Abort(pb.AbortRequest(request_ids=["unknown", "smg-1"]), timeout=60)
    assert await scheduler.next_abort() == ("smg-1", 0)
    assert (await call.read()).complete.finish_reason == "abort"
    await stub.Abort(pb.AbortRequest(request_ids=["smg-1"]), timeout=60)


async def test_a_key_aborts_nothing_of_another_key(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    keys = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("one", "two")]
    (tmp_path / "keys.yaml").write_text(json.dumps({"keys": keys}))
    gateway = await make_gateway(scheduler=scheduler.target, api_keys=tmp_path / "keys.yaml")
    as_one, as_two = ([("authorization", f"Bearer {name}")] for name in ("one", "two"))
    async with rpc.create_channel(f"127.0.0.1:{gateway.port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        call = stub.Generate(request(), timeout=60, metadata=as_one)
        add = await scheduler.next_add()
        await stub.Abort(pb.AbortRequest(request_ids=["smg-1"]), timeout=60, metadata=as_two)
        assert scheduler.aborts.empty()
        scheduler.tokens(add.handle, 0, [EOS])
        assert (await call.read()).complete.finish_reason == "stop"
        error = await failure(stub.HealthCheck(pb.HealthCheckRequest(), timeout=60))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.case("B70")
async def test_more_ids_than_anybody_aborts_are_refused(stub: Any) -> None:
    error = await failure(stub.Abort(pb.AbortRequest(request_ids=["x"] * 1025), timeout=60))
    assert (error.code(), violated_field(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "request_ids")


@pytest.mark.case("B17")
async def test_a_living_id_is_refused_whatever_protocol_it_came_by(stub: Any, scheduler: ScriptedScheduler) -> None:
    first = stub.Generate(request(), timeout=60)
    add = await scheduler.next_add()
    error = await failure(stub.Generate(request(), timeout=60))
    assert error.code() is grpc.StatusCode.ALREADY_EXISTS
    scheduler.tokens(add.handle, 0, [EOS])
    assert (await first.read()).complete.finish_reason == "stop"


async def test_a_request_that_fails_ends_with_its_status_and_no_complete(
    stub: Any, scheduler: ScriptedScheduler
) -> None:
    call = stub.Generate(request(stream=True), timeout=60)
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
    assert 45_000 < (await scheduler.next_add()).spec.deadline_ms <= 61_000  # gRPC rounds what it sends upwards
