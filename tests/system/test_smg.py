"""The SMG gateway in front of ours: what people get from it is what they get from us, and what they end, ends.

SMG is the released binary, started as its manual says, and asked with the `openai` package.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.vllm_engine.service import SERVICE_NAME
from holdback import AsyncClient, rpc
from holdback.cli.local import LocalStack
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2

pytestmark = [pytest.mark.loopback, pytest.mark.asyncio(loop_scope="module")]
MESSAGES: Any = [{"role": "user", "content": "hi"}]
START_S = 60.0
POLL_S = 0.05


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.asynccontextmanager
async def started_smg(worker: str, model: pathlib.Path, log: pathlib.Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """SMG in front of one gateway, and a client of it, once it is ready."""
    port, metrics_port = free_ports(2)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "smg", "launch", "--backend", "vllm", "--worker-urls", f"grpc://{worker}"),
            *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"},
        )
    try:
        base_url = f"http://127.0.0.1:{port}"
        await wait_until_ready(process, base_url, log)
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            yield client
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # asked to stop, it waits five seconds for a load balancer
        await process.wait()


async def wait_until_ready(process: asyncio.subprocess.Process, base_url: str, log: pathlib.Path) -> None:
    async with asyncio.timeout(START_S), httpx.AsyncClient(trust_env=False) as client:
        while True:
            if process.returncode is not None:
                pytest.fail(f"smg ended with status {process.returncode}; its log is {log}")
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{base_url}/readiness")).status_code == 200:
                    return
            await asyncio.sleep(POLL_S)  # it tells nobody when it is ready


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def smg(
    stack: LocalStack, tokenizer_directory: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[openai.AsyncOpenAI]:
    log = tmp_path_factory.mktemp("smg") / "log"
    async with started_smg(stack.gateway_address, tokenizer_directory, log) as client:
        yield client


async def get_load(stack: LocalStack) -> scheduler_pb2.GetLoadResponse:
    async with rpc.create_channel(stack.scheduler_address) as channel:
        stub: scheduler_pb2_grpc.SchedulerServiceAsyncStub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return await stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=60)


def num_aborted(load: scheduler_pb2.GetLoadResponse) -> int:
    return sum(entry.count for entry in load.finished if entry.finish_reason == types_pb2.FINISH_REASON_ABORT)


async def test_the_model_is_listed_by_its_first_name(smg: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in smg.models.list()] == ["small"]


async def test_a_chat_is_answered_as_our_own_protocol_answers_it(smg: openai.AsyncOpenAI, stack: LocalStack) -> None:
    answer = await smg.chat.completions.create(model="small", messages=MESSAGES, max_tokens=24, temperature=0)
    async with AsyncClient(stack.gateway_address, timeout_s=60) as client:
        ours = await client.generate(messages=MESSAGES, max_tokens=24, temperature=0)
    (choice,) = answer.choices
    assert choice.message.content == ours.text
    assert choice.finish_reason == ours.finish_reason.value
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        ours.usage.prompt_tokens,
        ours.usage.completion_tokens,
    )


async def test_a_streamed_chat_is_the_same_in_pieces(smg: openai.AsyncOpenAI) -> None:
    whole = await smg.chat.completions.create(model="small", messages=MESSAGES, max_tokens=24, temperature=0)
    stream = await smg.chat.completions.create(
        model="small",
        messages=MESSAGES,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usages = [], [], []
    async for chunk in stream:
        usages += [chunk.usage] if chunk.usage is not None else []
        for choice in chunk.choices:
            texts.append(choice.delta.content or "")
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert whole.usage is not None
    assert "".join(texts) == whole.choices[0].message.content
    assert len([text for text in texts if text]) > 1
    assert reasons == [whole.choices[0].finish_reason]
    assert [usage.completion_tokens for usage in usages] == [whole.usage.completion_tokens]


@pytest.mark.case("B48")
async def test_log_probabilities_are_those_of_the_tokens(smg: openai.AsyncOpenAI, stack: LocalStack) -> None:
    answer = await smg.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=1
    )
    async with AsyncClient(stack.gateway_address, timeout_s=60) as client:
        ours = await client.generate(messages=MESSAGES, max_tokens=8, temperature=0, num_logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [entry.logprob for entry in logprobs.content or []] == [entry.logprob for entry in ours.choices[0].logprobs]
    assert len(logprobs.content or []) == 8


async def test_a_completion_is_answered_whole_and_in_pieces(smg: openai.AsyncOpenAI, stack: LocalStack) -> None:
    options: Any = {
        "model": "small",
        "prompt": "Hello",
        "max_tokens": 20,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = await smg.completions.create(**options, n=2)
    async with AsyncClient(stack.gateway_address, timeout_s=60) as client:
        ours = await client.generate("Hello", max_tokens=20, temperature=0, ignore_eos=True)
    text = ours.text.rstrip("\ufffd")  # SMG shows nothing of a character that is incomplete at the end
    assert [choice.text for choice in whole.choices] == [text] * 2
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 2
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (ours.usage.prompt_tokens, 40)
    texts = [chunk.choices[0].text async for chunk in await smg.completions.create(**options, stream=True)]
    assert "".join(texts) == text


async def test_a_stop_string_ends_an_answer_at_the_engine_too(smg: openai.AsyncOpenAI, stack: LocalStack) -> None:
    async with AsyncClient(stack.gateway_address, timeout_s=60) as client:
        ours = await client.generate(messages=MESSAGES, max_tokens=24, temperature=0, ignore_eos=True)
    stop = ours.text[2:4]
    answer = await smg.chat.completions.create(
        model="small", messages=MESSAGES, max_tokens=24, temperature=0, stop=[stop], extra_body={"ignore_eos": True}
    )
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (ours.text[: ours.text.index(stop)], "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 24


@pytest.mark.case("B56")
async def test_a_stream_that_is_left_half_way_is_aborted_at_the_scheduler(
    smg: openai.AsyncOpenAI, stack: LocalStack
) -> None:
    num_before = num_aborted(await get_load(stack))
    stream = await smg.completions.create(
        model="small", prompt="x", max_tokens=250, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    assert (await get_load(stack)).num_running == 1
    await stream.close()
    async with asyncio.timeout(60):
        while num_aborted(load := await get_load(stack)) == num_before:
            pass
    assert num_aborted(load) == num_before + 1
    assert (load.num_running, load.num_waiting) == (0, 0)


@pytest.mark.case("B75")
async def test_what_we_refuse_arrives_as_a_bad_request_in_our_words(smg: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"sampling_params\.json_schema is set, which is not supported"):
        await smg.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=4, response_format={"type": "json_object"}
        )
    with pytest.raises(openai.BadRequestError, match=r"sampling_params\.stop_token_ids\[0\] is 99999"):
        await smg.chat.completions.create(
            model="small", messages=MESSAGES, max_tokens=4, extra_body={"stop_token_ids": [99999]}
        )


def changed(arguments: Sequence[str], **values: object) -> list[str]:
    """The same command line with other values: `max_num_seqs=1` for what follows `--max-num-seqs`."""
    found = list(arguments)
    for name, value in values.items():
        found[found.index("--" + name.replace("_", "-")) + 1] = str(value)
    return found


async def wait_until_lost(stack: LocalStack) -> None:
    """Returns when the gateway says that the engine protocol would not be served."""
    async with rpc.create_channel(stack.gateway_address) as channel:
        stub: health_pb2_grpc.HealthAsyncStub = health_pb2_grpc.HealthStub(channel)
        replies: Any = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        async with asyncio.timeout(60):
            async for reply in replies:
                if reply.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    return


@pytest.mark.case("B59")
async def test_a_full_queue_is_a_429_and_a_pool_without_an_executor_a_503_in_our_words(
    stack_arguments: dict[str, list[str]], tokenizer_directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    arguments = stack_arguments | {
        "scheduler": ["--max-num-queued-reqs", "1", "--executor-loss-timeout-s", "0.5"],
        "executor": changed(stack_arguments["executor"], max_num_seqs=1, simulated_decode_us=50_000),
    }
    options: Any = {"model": "small", "prompt": "x", "max_tokens": 250, "extra_body": {"ignore_eos": True}}
    async with LocalStack(arguments) as stack:
        await stack.wait_until_ready()
        async with started_smg(stack.gateway_address, tokenizer_directory, tmp_path / "log") as smg:
            running = await smg.completions.create(**options, stream=True)
            await anext(aiter(running))
            waiting = asyncio.create_task(smg.completions.create(**options))
            async with asyncio.timeout(60):
                while not (await get_load(stack)).num_waiting:
                    pass
            with pytest.raises(openai.RateLimitError, match="the queue is full: max_num_queued_reqs is 1"):
                await smg.completions.create(**options)
            await running.close()
            waiting.cancel()
            stack.processes[2].child.kill()
            await wait_until_lost(stack)
            with pytest.raises(openai.InternalServerError, match="the pool has had no executor") as caught:
                await smg.completions.create(**options)
    assert caught.value.status_code == 503


@pytest.mark.model
async def test_a_real_tokenizer_and_template_give_the_same_chat(
    model_directory: pathlib.Path, stack_arguments: dict[str, list[str]], tmp_path: pathlib.Path
) -> None:
    executor = changed(stack_arguments["executor"], simulated_vocab_size=49152)
    gateway = ["--tokenizer", str(model_directory), "--served-model-name", "smollm2"]
    async with LocalStack({"executor": executor, "gateway": gateway}) as stack:
        await stack.wait_until_ready()
        async with started_smg(stack.gateway_address, model_directory, tmp_path / "log") as smg:
            answer = await smg.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=24, temperature=0)
        async with AsyncClient(stack.gateway_address, timeout_s=60) as client:
            ours = await client.generate(messages=MESSAGES, max_tokens=24, temperature=0)
    assert answer.choices[0].message.content == ours.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == ours.usage.prompt_tokens
