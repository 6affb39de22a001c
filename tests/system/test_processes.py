"""Scheduler, executor and gateway as processes: answers, refusals, and how they start, fail and stop."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import re
import signal
import sys

import pytest

from executor_svc.devices.simulated import expected_tokens
from holdback import AsyncClient, rpc
from holdback.cli.local import LocalStack
from holdback.errors import (
    AlreadyExistsError,
    ConfigError,
    ErrorReason,
    InvalidArgumentError,
    NotFoundError,
)
from holdback.types import FinishReason
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from tests.system.conftest import CHUNK, MAX_MODEL_LEN, VOCAB_SIZE

pytestmark = [pytest.mark.loopback, pytest.mark.asyncio(loop_scope="module")]
PROMPT = [7, 300, 22, 41, 5]


def greedy(prompt, count):
    return expected_tokens(prompt, count, VOCAB_SIZE)


async def get_state(stack, request_id=""):
    async with rpc.create_channel(stack.scheduler_address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return await stub.GetState(scheduler_pb2.GetStateRequest(request_id=request_id), timeout=60)


async def answer(stack, prompt=PROMPT, **options):
    async with AsyncClient(stack.gateway_address, timeout_s=60) as client:
        return await client.generate(token_ids=prompt, **({"max_tokens": 8, "ignore_eos": True} | options))


# ---- answers ----


async def test_the_answer_is_the_one_worked_out_on_paper(stack):
    # token t at position p adds (t + p) * (p + 1); the next token is 16 + sum mod 496:
    # (7+0)*1 + (300+1)*2 + (22+2)*3 + (41+3)*4 + (5+4)*5 = 902 -> 16 + 902 % 496 = 422
    generation = await answer(stack, max_tokens=1)
    assert generation.token_ids == (422,)
    assert generation.finish_reason is FinishReason.LENGTH


async def test_many_streams_at_once_each_get_their_own_answer(stack):
    prompts = [[number + 17, 40, number * 11 + 16] for number in range(12)]
    generations = await asyncio.gather(*(answer(stack, prompt, max_tokens=40) for prompt in prompts))
    for prompt, generation in zip(prompts, generations, strict=True):
        assert list(generation.token_ids) == greedy(prompt, 40)


async def test_the_state_shows_each_chunk_and_then_decodes(stack):
    prompt = [(i * 7) % 400 + 20 for i in range(150)]
    generation = await answer(stack, prompt, max_tokens=3, request_id="chunks", cache_salt="chunks")
    assert list(generation.token_ids) == greedy(prompt, 3)
    steps = [step for lane in (await get_state(stack, "chunks")).lanes for step in lane.steps]
    prefill, decode = types_pb2.SCHEDULER_STATE_ACTIVE_PREFILL, types_pb2.SCHEDULER_STATE_ACTIVE_DECODE
    rows = [
        (step.state, row.num_computed_tokens, row.num_scheduled_tokens, row.num_scheduled_tokens_padded)
        for step in steps
        for row in step.rows
    ]
    assert rows == [
        (prefill, 0, CHUNK, CHUNK),
        (prefill, CHUNK, CHUNK, CHUNK),
        (prefill, 128, 22, 32),
        (decode, 150, 1, 1),
        (decode, 151, 1, 1),
    ]


@pytest.mark.case("B18")
async def test_a_prompt_that_was_seen_is_served_from_its_blocks_and_answered_equally(stack):
    for length, hit in ((64, 48), (65, 64), (16, 0), (15, 0)):
        prompt = [(length * 3 + i * 5) % 480 + 17 for i in range(length)]
        cold = await answer(stack, prompt, cache_salt=f"seen-{length}")
        warm = await answer(stack, prompt, cache_salt=f"seen-{length}")
        assert list(cold.token_ids) == list(warm.token_ids) == greedy(prompt, 8)
        assert cold.usage.cached_tokens == 0
        assert warm.usage.cached_tokens == hit


@pytest.mark.case("B23")
async def test_a_prompt_is_not_served_from_the_blocks_of_another_salt(stack):
    prompt = [(i * 9) % 480 + 17 for i in range(40)]
    hits = [(await answer(stack, prompt, cache_salt=salt)).usage.cached_tokens for salt in ("a", "b", "", "a")]
    assert hits == [0, 0, 0, 32]


@pytest.mark.case("B10")
async def test_the_context_limit_is_exact(stack):
    prompts = {length: [20 + i % 300 for i in range(length)] for length in (250, 255, 256, 257)}
    for length in (256, 257):
        with pytest.raises(InvalidArgumentError, match=f"{length}.*{MAX_MODEL_LEN}") as caught:
            await answer(stack, prompts[length], max_tokens=None)
        assert caught.value.reason is ErrorReason.PROMPT_TOO_LONG
    one = await answer(stack, prompts[255], max_tokens=None)
    assert (len(one.token_ids), one.finish_reason) == (1, FinishReason.LENGTH)
    six = await answer(stack, prompts[250], max_tokens=100)
    assert (len(six.token_ids), six.finish_reason) == (6, FinishReason.LENGTH)


@pytest.mark.case("B47")
@pytest.mark.parametrize("max_tokens", [1, 5, 20])
async def test_usage_counts_exactly_what_was_asked_for(stack, max_tokens):
    whole = await answer(stack, max_tokens=max_tokens)
    assert whole.finish_reason is FinishReason.LENGTH
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, max_tokens)
    assert whole.usage.total_tokens == 5 + max_tokens
    async with AsyncClient(stack.gateway_address) as client:
        stream = client.stream(token_ids=PROMPT, max_tokens=max_tokens, ignore_eos=True)
        assert sum([len(piece.token_ids) async for piece in stream]) == max_tokens
        assert stream.usage == whole.usage


# ---- refusals, each with the rest running on ----

REFUSALS = [
    ({"prompt": []}, InvalidArgumentError, ErrorReason.PROMPT_EMPTY, "0 tokens; allowed: [1, 255]"),
    ({"prompt": [1, VOCAB_SIZE]}, InvalidArgumentError, ErrorReason.TOKEN_OUT_OF_VOCABULARY, str(VOCAB_SIZE)),
    ({"temperature": -0.1}, InvalidArgumentError, ErrorReason.INVALID_FIELD, "temperature is -0.1"),
    ({"temperature": float("nan")}, InvalidArgumentError, ErrorReason.INVALID_FIELD, "temperature is nan"),
    ({"top_p": 1.5}, InvalidArgumentError, ErrorReason.INVALID_FIELD, "top_p is 1.5"),
    ({"top_k": -2}, InvalidArgumentError, ErrorReason.INVALID_FIELD, "top_k is -2"),
    ({"max_tokens": 0}, InvalidArgumentError, ErrorReason.INVALID_FIELD, "max_tokens is 0"),
    ({"stop": ["x", ""]}, InvalidArgumentError, ErrorReason.INVALID_FIELD, "stop"),
    ({"model": "other"}, NotFoundError, ErrorReason.MODEL_NOT_FOUND, "other"),
]


@pytest.mark.case("B50")
@pytest.mark.parametrize(("options", "error", "reason", "words"), REFUSALS)
async def test_a_bad_request_is_refused_by_name_while_a_good_one_runs(stack, options, error, reason, words):
    good = asyncio.create_task(answer(stack, max_tokens=30))
    with pytest.raises(error, match=re.escape(words)) as caught:
        await answer(stack, **options)
    assert caught.value.reason is reason
    assert list((await good).token_ids) == greedy(PROMPT, 30)


@pytest.mark.case("B50")
async def test_an_empty_text_is_refused(stack):
    async with AsyncClient(stack.gateway_address) as client:
        with pytest.raises(InvalidArgumentError) as caught:
            await client.generate("")
        assert caught.value.reason is ErrorReason.PROMPT_EMPTY
        with pytest.raises(InvalidArgumentError, match="messages"):
            await client.generate(messages=[])


@pytest.mark.case("B17")
async def test_a_living_id_is_refused_and_the_first_request_completes(stack):
    async with AsyncClient(stack.gateway_address) as client:
        first = client.stream(token_ids=PROMPT, max_tokens=200, ignore_eos=True, request_id="job-7")
        tokens = list((await anext(first)).token_ids)
        with pytest.raises(AlreadyExistsError, match="job-7"):
            await client.generate(token_ids=PROMPT, request_id="job-7")
        async for piece in first:
            tokens += piece.token_ids
        assert tokens == greedy(PROMPT, 200)
        again = await client.generate(token_ids=PROMPT, request_id="job-7", max_tokens=2)
        assert len(again.token_ids) == 2


async def test_a_client_that_goes_away_frees_its_blocks(stack):
    async with AsyncClient(stack.gateway_address) as client:
        stream = client.stream(token_ids=PROMPT, max_tokens=250, ignore_eos=True)
        await anext(stream)
        stream.close()
    async with asyncio.timeout(60):
        while True:
            (lane,) = (await get_state(stack)).lanes
            if lane.num_running == 0:
                break
    assert lane.num_free_blocks == lane.num_usable_blocks


async def test_an_executor_with_another_model_is_refused_and_the_pool_goes_on(stack):
    status, log = await run(
        "executor",
        *("--device", "simulated", "--simulated-fingerprint", "another"),
        *("--max-model-len", MAX_MODEL_LEN, "--simulated-vocab-size", VOCAB_SIZE),
        *("--scheduler", stack.scheduler_address),
    )
    assert status != 0
    assert "fingerprint" in log
    assert "another" in log
    assert "simulated" in log
    assert len((await answer(stack)).token_ids) == 8


# ---- processes ----


async def run(command, *arguments, timeout_s=60.0):
    """Runs one command to its end; returns its exit status and all that it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdback.cli", command, *map(str, arguments)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return process.returncode, output.decode()


async def test_a_port_of_another_holdback_process_is_refused_by_each(stack, tokenizer_directory):
    port = stack.gateway.port
    for command, arguments in {
        "scheduler": [],
        "executor": ["--scheduler", stack.scheduler_address, "--device", "simulated"],
        "gateway": ["--scheduler", stack.scheduler_address, "--tokenizer", tokenizer_directory],
    }.items():
        status, log = await run(command, *arguments, "--port", port)
        assert status == 2, (command, log)
        assert f"port is {port}" in log
    assert len((await answer(stack)).token_ids) == 8


REFUSED_CONFIGURATIONS = [
    # K1: 16 usable blocks of 16 hold no request of 512 tokens
    (["--max-model-len", 512, "--num-blocks", 17, "--block-size", 16], ["17", "512"]),
    # K2: the last bucket is not the largest chunk; not ascending; fewer tokens than sequences
    (["--max-num-batched-tokens", 256, "--num-batched-tokens-buckets", "64,128"], ["128", "256"]),
    (["--max-num-batched-tokens", 128, "--num-batched-tokens-buckets", "128,64,128"], ["ascending"]),
    (["--max-num-batched-tokens", 4, "--max-num-seqs", 8], ["4", "8"]),
]


@pytest.mark.case("B02")
@pytest.mark.parametrize(("arguments", "words"), REFUSED_CONFIGURATIONS)
async def test_an_executor_that_cannot_work_does_not_start(arguments, words):
    status, log = await run("executor", "--scheduler", "127.0.0.1:1", "--device", "simulated", *arguments)
    assert status == 2, log
    for word in words:
        assert word in log


async def test_a_directory_that_is_no_model_is_refused_by_executor_and_gateway(tmp_path):
    for command, flag in (("executor", "--model"), ("gateway", "--tokenizer")):
        status, log = await run(command, "--scheduler", "127.0.0.1:1", flag, tmp_path)
        assert status == 2, log
        assert str(tmp_path) in log


async def test_a_killed_executor_is_a_named_failure_of_the_stack(stack_arguments):
    async with LocalStack(stack_arguments) as stack:
        await stack.wait_until_ready()
        executor = stack.processes[2]
        executor.child.kill()
        ended = await stack.wait_until_one_ends()
    assert ended is executor
    assert str(executor.failure()) == f"executor-0 ended with status {-signal.SIGKILL}; its last log lines say why"


async def test_a_stack_whose_executor_cannot_start_says_so(stack_arguments):
    arguments = stack_arguments | {"executor": [*stack_arguments["executor"], "--num-blocks", "2"]}
    with pytest.raises(ConfigError, match="executor-0 cannot start as configured"):
        async with LocalStack(arguments) as stack:
            await stack.wait_until_ready()
    assert all(process.exited.done() for process in stack.processes)


async def test_every_process_ends_with_0_when_it_is_asked_to(stack_arguments):
    async with LocalStack(stack_arguments) as stack:
        await stack.wait_until_ready()
        await answer(stack)
        assert await stack.stop() == [0, 0, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_stream_goes_on_at_the_scheduler_that_comes_back(stack_arguments, number):
    async with LocalStack(stack_arguments) as stack:
        await stack.wait_until_ready()
        async with AsyncClient(stack.gateway_address, timeout_s=60) as client:
            stream = client.stream(token_ids=PROMPT, max_tokens=240, ignore_eos=True)
            tokens = list((await anext(stream)).token_ids)
            stack.scheduler.child.send_signal(number)
            await stack.scheduler.exited
            await stack.spawn("scheduler-again", "scheduler", ["--port", str(stack.scheduler.port)])
            async for piece in stream:
                tokens += piece.token_ids
    assert tokens == greedy(PROMPT, 240)


def children_of(pid):
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has gone")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
async def test_no_process_outlives_up_however_it_ends(tokenizer_directory, number):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdback.cli", "up", "--device", "simulated", "--model", str(tokenizer_directory)),
        *("--executor.simulated-vocab-size", str(VOCAB_SIZE)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            async for line in process.stdout:
                if line.startswith(b"ready;"):
                    break
            children = children_of(process.pid)
            assert len(children) == 3
            process.send_signal(number)
            await process.wait()
            while any(map(is_running, children)):  # noqa: ASYNC110 - they are not ours, so nothing tells us
                await asyncio.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def test_up_prints_its_addresses_and_stops_on_a_signal(tokenizer_directory, stack_arguments):
    flags = [f"--executor.{flag[2:]}" if flag.startswith("--") else flag for flag in stack_arguments["executor"][2:]]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdback.cli", "up", "--device", "simulated", "--model", str(tokenizer_directory)),
        *map(str, flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            lines = []
            assert process.stdout is not None
            async for line in process.stdout:
                lines.append(line.decode())
                if "ready;" in lines[-1]:
                    break
            assert re.search(r"^http +http://127\.0\.0\.1:\d+/v1 ", "".join(lines), re.MULTILINE)
            (address,) = re.findall(r"^gateway +(\S+:\d+)", "".join(lines), re.MULTILINE)
            status, text = await run("generate", "--address", address, "--max-tokens", "5", "hello")
            assert status == 0, text
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0
            await process.stdout.read()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def test_generate_without_a_gateway_fails_in_words():
    status, text = await run("generate", "--address", "127.0.0.1:1", "--timeout", "2", "hello")
    assert status == 1
    assert "Traceback" not in text
    assert "127.0.0.1:1" in text


async def test_up_refuses_a_flag_of_no_process(tokenizer_directory):
    status, text = await run("up", "--model", tokenizer_directory, "--exec.port", "1")
    assert status == 2
    assert "--exec.port" in text
