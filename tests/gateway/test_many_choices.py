"""A request of many choices: what they share is worked out once, and the loop serves others between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.generation import CallContext
from gateway.openai.completion import CompletionRequest
from gateway.server import GatewayServer
from holdback import AsyncClient, codec
from holdback.errors import RequestAbortedError
from holdback.types import FinishReason, RequestSpec, SamplingParams
from holdback.v1 import inference_pb2, types_pb2
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.texts import EOS, ids_of

pytestmark = pytest.mark.loopback


def on_submission(gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch, call: Callable[[int], None]) -> None:
    """Has `call` told of each submission, how many there were."""
    (pool,) = gateway.pools
    submit, num_submitted = pool.engine.submit, 0

    def submitting(*arguments: Any) -> Any:
        nonlocal num_submitted
        num_submitted += 1
        call(num_submitted)
        return submit(*arguments)

    monkeypatch.setattr(pool.engine, "submit", submitting)


async def test_each_choice_is_told_in_full_and_what_they_share_is_encoded_once(
    client: AsyncClient, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_sampling, num_encoded = codec.encode_sampling, 0

    def encoding(params: SamplingParams) -> types_pb2.SamplingParams:
        nonlocal num_encoded
        num_encoded += 1
        return encode_sampling(params)

    monkeypatch.setattr("holdback.request_codec.encode_sampling", encoding)
    scheduler.answer = [EOS]
    options: dict[str, Any] = {
        "stop_token_ids": [7, 8],
        "allowed_token_ids": [9, 10],
        "logit_bias": {11: 0.5, 12: -0.5},
        "max_tokens": 3,
    }
    await client.generate("xy", n=4, seed=5, request_id="r", priority=2, cache_salt="salt", **options)
    assert num_encoded == 1
    for index in range(4):
        spec = (await scheduler.next_add()).spec
        assert 0 < spec.deadline_ms <= 61_000  # gRPC rounds it up
        expected = RequestSpec(
            request_id=f"r/{index}",
            prompt_token_ids=ids_of("xy"),
            sampling=SamplingParams(seed=5 + index, **options),
            priority=2,
            cache_salt="salt",
            deadline_ms=spec.deadline_ms,
        )
        assert spec == codec.encode_spec(expected)


async def test_the_loop_serves_others_between_the_choices(
    gateway: GatewayServer, client: AsyncClient, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, num_turns = set(), 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    on_submission(gateway, monkeypatch, lambda _: turns.add(num_turns))
    scheduler.answer = [EOS]
    other = asyncio.create_task(take_turns())
    await client.generate("x", n=16)
    other.cancel()
    assert len(turns) == 16


async def test_a_request_that_is_aborted_between_its_choices_leaves_none_behind(
    gateway: GatewayServer, client: AsyncClient, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()

    def abort(num_submitted: int) -> None:
        if num_submitted == 3:
            loop.call_soon(gateway._generations.abort, "r", "")

    on_submission(gateway, monkeypatch, abort)
    with pytest.raises(RequestAbortedError, match="was aborted before it began"):
        await client.generate("x", n=16, request_id="r")
    added = [(await scheduler.next_add()).spec.request_id for _ in range(3)]
    assert added == [(await scheduler.next_abort())[0] for _ in range(3)] == ["r/0", "r/1", "r/2"]
    assert gateway._generations.num_running == 0
    assert scheduler.adds.empty()


async def test_choices_that_a_leaving_client_has_not_begun_count_as_aborted_too(
    gateway: GatewayServer, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pool,) = gateway.pools

    async def run() -> None:
        message = inference_pb2.Generation(text="x", n=16)
        async with gateway._generations.run(message, CallContext()):
            raise AssertionError("it was cancelled before")

    def leave(num_submitted: int) -> None:
        if num_submitted == 3:
            running.cancel()

    on_submission(gateway, monkeypatch, leave)
    running = asyncio.create_task(run())
    with pytest.raises(asyncio.CancelledError):
        await running
    assert pool.counts.num_ended[FinishReason.ABORT] == 16
    assert [(await scheduler.next_abort())[0].split("/")[1] for _ in range(3)] == ["0", "1", "2"]


async def test_what_many_prompts_share_is_put_into_a_message_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_built = 0
    sampling = CompletionRequest._sampling

    def building(request: CompletionRequest) -> types_pb2.SamplingParams:
        nonlocal num_built
        num_built += 1
        return sampling(request)

    monkeypatch.setattr(CompletionRequest, "_sampling", building)
    request = CompletionRequest.read({"prompt": ["a", "b", "c"], "logit_bias": {"7": 0.5}, "echo": True})
    messages = request.generations()
    assert num_built == 1
    assert [message.text for message in messages] == ["a", "b", "c"]
    assert all(message.echo and message.sampling.logit_bias[0].token_id == 7 for message in messages)
    (message,) = CompletionRequest.read({"prompt": [[1, 2]]}).generations()
    assert list(message.token_ids.token_ids) == [1, 2]
