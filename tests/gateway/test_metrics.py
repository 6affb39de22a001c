"""What a gateway counts: exactly what clients were told, once, whatever happened behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gateway.counts import PoolCounts, RequestTimes
from gateway.server import GatewayServer
from holdback import AsyncClient
from holdback.errors import DeadlineExceededError, ErrorReason, InternalError, NotFoundError
from holdback.types import FinishReason
from tests.gateway.conftest import wait_until_ready
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer
from tests.prometheus import Scrape, scrape

pytestmark = pytest.mark.loopback
PROMPT = [5, 6, 7]


@pytest.fixture
async def gateway(make_gateway: Callable[..., Any], scheduler: ScriptedScheduler) -> GatewayServer:
    server: GatewayServer = await make_gateway(scheduler=scheduler.target, metrics_port=0)
    await wait_until_ready(server)
    return server


async def read(gateway: GatewayServer) -> Scrape:
    assert gateway.metrics_port is not None
    return await asyncio.to_thread(scrape, gateway.metrics_port)


def ids_of(text: str) -> list[int]:
    """One token for each byte."""
    return byte_ids(make_tokenizer("byte_level"), text.encode())


def ended(shown: Scrape) -> dict[str, float]:
    """How many requests have ended, by reason; those that there are."""
    counts = {
        reason.value: shown.of("vllm:request_success_total", finished_reason=reason.value) for reason in FinishReason
    }
    return {reason: count for reason, count in counts.items() if count}


@pytest.mark.case("B47")
@pytest.mark.parametrize("limit", [1, 5, 20])
async def test_tokens_are_counted_as_usage_says(
    limit: int, client: AsyncClient, gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer, scheduler.finish_reason = [40 + i for i in range(limit)], FinishReason.LENGTH
    answer = await client.generate(token_ids=PROMPT, max_tokens=limit, ignore_eos=True)
    stream = client.stream(token_ids=PROMPT, max_tokens=limit, ignore_eos=True)
    assert sum([len(piece.token_ids) async for piece in stream]) == answer.usage.completion_tokens == limit
    shown = await read(gateway)
    assert shown.of("vllm:generation_tokens_total", model_name="toy", engine="0") == 2 * limit
    assert shown.of("vllm:prompt_tokens_total") == 2 * len(PROMPT)
    assert shown.of("vllm:request_generation_tokens_sum") == 2 * limit
    assert shown.of("vllm:request_prompt_tokens_sum") == 2 * len(PROMPT)
    assert shown.of("vllm:time_to_first_token_seconds_count") == 2
    assert shown.of("vllm:request_time_per_output_token_seconds_count") == (2 if limit > 1 else 0)
    assert ended(shown) == {"length": 2}


async def test_choices_end_one_by_one_and_their_prompt_counts_once(
    client: AsyncClient, gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [40, 2]
    answer = await client.generate(token_ids=PROMPT, n=3)
    shown = await read(gateway)
    assert ended(shown) == {"stop": 3}
    assert shown.of("vllm:generation_tokens_total") == answer.usage.completion_tokens == 6
    assert shown.of("vllm:prompt_tokens_total") == answer.usage.prompt_tokens == 3


async def test_a_stop_string_ends_with_stop_and_what_came_after_it_is_not_counted(
    client: AsyncClient, gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    asking = asyncio.create_task(client.generate(token_ids=PROMPT, stop=["c"]))
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, ids_of("abcde"))
    answer = await asking
    await scheduler.next_abort()
    shown = await read(gateway)
    assert shown.of("vllm:generation_tokens_total") == answer.usage.completion_tokens == 3
    assert ended(shown) == {"stop": 1}


@pytest.mark.case("B56")
async def test_a_call_past_its_deadline_counts_as_aborted_once(
    gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    async with AsyncClient(f"127.0.0.1:{gateway.port}", timeout_s=2, max_retries=0, max_resumes=0) as client:
        asking = asyncio.create_task(client.generate(token_ids=PROMPT, max_tokens=30))
        add = await scheduler.next_add()
        scheduler.tokens(add.handle, 0, [40])
        with pytest.raises(DeadlineExceededError):
            await asking
    await scheduler.next_abort()
    async with asyncio.timeout(60):
        while not ended(shown := await read(gateway)):
            pass
    assert ended(shown) == {"abort": 1}
    assert shown.of("holdback:requests_open") == 0
    assert shown.of("vllm:e2e_request_latency_seconds_count") == 0


@pytest.mark.case("B67")
async def test_a_mass_abort_is_counted_and_nothing_stays_open(
    client: AsyncClient, gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    asking = [asyncio.create_task(client.generate(token_ids=[5, number])) for number in range(20)]
    for _ in asking:
        add = await scheduler.next_add()
        scheduler.tokens(add.handle, 0, [40])
    before = await read(gateway)
    assert before.of("holdback:requests_open") == 20
    for task in asking:
        task.cancel()
    for _ in asking:
        await scheduler.next_abort()
    async with asyncio.timeout(60):
        while (after := await read(gateway)).of("holdback:requests_open"):
            pass
    assert ended(after) == {"abort": 20}
    assert all(after.counters[key] >= value for key, value in before.counters.items())


async def test_a_request_that_is_submitted_again_counts_its_tokens_and_its_end_once(
    client: AsyncClient, gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    asking = asyncio.create_task(client.generate(token_ids=PROMPT, max_tokens=4, ignore_eos=True))
    add = await scheduler.next_add()
    scheduler.started(add.handle, queued_ms=250)
    scheduler.tokens(add.handle, 0, [40, 41])
    scheduler.break_stream()
    again = await scheduler.next_add()
    assert again.spec.generation == 1
    assert (await read(gateway)).of("holdback:scheduler_connected") == 1
    scheduler.started(again.handle, queued_ms=9000)
    scheduler.tokens(again.handle, len(again.spec.output_token_ids), [42, 43][len(again.spec.output_token_ids) - 2 :])
    scheduler.ended(again.handle, FinishReason.LENGTH)
    assert (await asking).token_ids == (40, 41, 42, 43)
    shown = await read(gateway)
    assert shown.of("vllm:generation_tokens_total") == 4
    assert shown.of("vllm:prompt_tokens_total") == 3
    assert ended(shown) == {"length": 1}
    assert shown.of("holdback:requests_resubmitted_total", model_name="toy") == 1
    assert shown.of("vllm:request_queue_time_seconds_sum") == 0.25
    assert shown.of("vllm:time_to_first_token_seconds_count") == 1
    assert shown.of("vllm:inter_token_latency_seconds_count") == 1


async def test_what_a_client_resumes_with_was_counted_elsewhere(
    client: AsyncClient, gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    asking = asyncio.create_task(
        client.generate(token_ids=PROMPT, output_token_ids=[40, 41], seed=1, max_tokens=4, ignore_eos=True)
    )
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 2, [42, 43])
    scheduler.ended(add.handle, FinishReason.LENGTH)
    await asking
    shown = await read(gateway)
    assert shown.of("vllm:generation_tokens_total") == 2
    assert shown.of("vllm:prompt_tokens_total") == 0
    assert ended(shown) == {"length": 1}


async def test_the_first_error_is_an_increase_for_its_series_was_there_before(gateway: GatewayServer) -> None:
    """Prometheus sees none in a series that begins with 1."""
    shown = await read(gateway)
    for model_name in ("toy", ""):
        for reason in ErrorReason:
            series = shown.matching("holdback:request_errors_total", {"model_name": model_name, "reason": reason.value})
            assert series == [0], reason


async def test_errors_are_counted_by_their_reason(
    client: AsyncClient, gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    asking = asyncio.create_task(client.generate(token_ids=PROMPT))
    add = await scheduler.next_add()
    scheduler.ended(add.handle, FinishReason.ERROR, error=InternalError("lost", reason=ErrorReason.TOO_MANY_MOVES))
    with pytest.raises(InternalError):
        await asking
    with pytest.raises(NotFoundError):
        await client.generate(token_ids=PROMPT, model="other")
    shown = await read(gateway)
    assert shown.of("holdback:request_errors_total", model_name="toy", reason="TOO_MANY_MOVES") == 1
    assert shown.of("holdback:request_errors_total", model_name="", reason="MODEL_NOT_FOUND") == 1
    assert shown.of("holdback:request_errors_total") == 2
    assert ended(shown) == {"error": 1}


async def test_what_http_refuses_before_a_model_is_chosen_is_counted(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler
) -> None:
    gateway = await make_gateway(scheduler=scheduler.target, metrics_port=0, http_port=0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http.port}", trust_env=False) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "temperature": -1})
    assert response.json()["error"]["code"] == "invalid_field"
    shown = await read(gateway)
    assert shown.of("holdback:request_errors_total", model_name="", reason="INVALID_FIELD") == 1
    assert shown.of("holdback:request_errors_total") == 1


def test_the_parts_of_a_request_add_up() -> None:
    now = 10.0
    counts = PoolCounts()
    times = RequestTimes(counts, lambda: now, arrived_at=10.0)
    now = 12.0
    times.start(queued_s=1.5)
    now = 13.0
    times.start(queued_s=7.0)  # bound again after a loss
    times.add_tokens()
    now = 17.0
    times.add_tokens()
    times.end()
    counts.end(FinishReason.LENGTH, times, num_prompt=3, num_outputs=5)
    assert (counts.time_to_first_token_s.sum, counts.between_tokens_s.sum) == (3.0, 4.0)
    assert (counts.queue_s.sum, counts.prefill_s.sum, counts.decode_s.sum) == (1.5, 1.0, 4.0)
    assert (counts.inference_s.sum, counts.whole_s.sum, counts.per_token_s.sum) == (5.0, 7.0, 1.0)
