"""The OpenAI HTTP API of real processes: answers of the simulated device, clients that leave, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal

import httpx
import pytest
import pytest_asyncio
from openai import APIStatusError, AsyncOpenAI

from executor_svc.devices.simulated import expected_tokens
from holdback import rpc
from holdback.cli.local import LocalStack
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.system.conftest import VOCAB_SIZE

pytestmark = [pytest.mark.loopback, pytest.mark.asyncio(loop_scope="module")]
PROMPT = [7, 300, 22, 41, 5]


def with_http(arguments):
    return arguments | {"gateway": [*arguments["gateway"], "--http-port", "0"]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http_stack(stack_arguments):
    async with LocalStack(with_http(stack_arguments)) as running:
        await running.wait_until_ready()
        yield running


@contextlib.asynccontextmanager
async def client_of(stack):
    url = f"http://{stack.http_address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def num_running(stack):
    async with rpc.create_channel(stack.scheduler_address) as channel:
        load = await scheduler_pb2_grpc.SchedulerServiceStub(channel).GetLoad(
            scheduler_pb2.GetLoadRequest(), timeout=60
        )
    return load.num_running + load.num_waiting


async def test_the_tokens_are_those_of_the_device_and_usage_counts_them(http_stack):
    async with client_of(http_stack) as client:
        resumed = {"output_token_ids": expected_tokens(PROMPT, 3, VOCAB_SIZE), "ignore_eos": True}
        answer = await client.completions.create(
            model="small", prompt=PROMPT, max_tokens=8, temperature=0, seed=1, extra_body=resumed
        )
        whole = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
    assert whole.choices[0].text.endswith(answer.choices[0].text)
    assert answer.usage.completion_tokens == whole.usage.completion_tokens == 8
    assert whole.choices[0].finish_reason == "length"


async def test_a_streamed_chat_is_the_whole_one(http_stack):
    messages = [{"role": "user", "content": "How are you?"}]
    options = {"model": "small", "messages": messages, "max_tokens": 20, "temperature": 0}
    async with client_of(http_stack) as client:
        whole = await client.chat.completions.create(**options)
        stream = await client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.case("B56")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_what_it_used(http_stack, stream):
    body = {"prompt": PROMPT, "max_tokens": 240, "ignore_eos": True, "stream": stream}
    async with httpx.AsyncClient(base_url=f"http://{http_stack.http_address}", trust_env=False) as http:
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        async with asyncio.timeout(60):
            while await num_running(http_stack) == 0:
                assert not asking.done()
            asking.cancel()
            while await num_running(http_stack):
                pass
        await asyncio.gather(asking, return_exceptions=True)
        metrics = (await http.get("/metrics")).text
    assert 'status="499"' in metrics


async def test_a_refusal_is_openais_exception(http_stack):
    async with client_of(http_stack) as client:
        with pytest.raises(APIStatusError) as caught:
            await client.completions.create(model="small", prompt=[5] * 300)
    assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")


@pytest.mark.case("B62")
async def test_a_gateway_told_to_stop_ends_its_streams_in_order_and_exits_with_0(stack_arguments):
    arguments = with_http(stack_arguments)
    arguments["executor"] = [*arguments["executor"], "--simulated-decode-us", "20000"]
    async with LocalStack(arguments) as stack:
        await stack.wait_until_ready()
        body = {"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True, "stream": True}
        async with (
            httpx.AsyncClient(base_url=f"http://{stack.http_address}", timeout=60, trust_env=False) as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.aiter_lines()
            first = json.loads((await anext(lines)).removeprefix("data: "))
            stack.gateway.child.send_signal(signal.SIGTERM)
            while (await http.get("/health/ready")).status_code == 200:
                pass
            late = await http.post("/v1/completions", json=body)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert first["model"] == "small"
        assert await asyncio.wait_for(stack.gateway.exited, 60) == 0
