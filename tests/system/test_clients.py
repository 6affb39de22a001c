"""The client in Python and the one of examples/typescript pass the same scenarios on the same gateways."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio

from executor_svc.devices.simulated import expected_tokens
from holdback import AsyncClient, rpc
from holdback.cli.local import LocalStack
from holdback.errors import HoldbackError, InvalidArgumentError, ResourceExhaustedError
from holdback.options import GenerateOptions
from holdback.testing import Answer, MockGateway
from holdback.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.system.conftest import VOCAB_SIZE

pytestmark = [pytest.mark.loopback, pytest.mark.asyncio(loop_scope="module")]

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPT = [7, 300, 22, 41, 5]
DECODE_US = 20_000

Line = dict[str, Any]
Scenario = Callable[..., contextlib.AbstractAsyncContextManager[AsyncIterator[Line]]]
"""Makes one stream: `addresses`, `options` and settings in, lines out as `scenario.ts` describes them."""


@contextlib.asynccontextmanager
async def typescript(addresses: Sequence[str], options: Line, **settings: Any) -> AsyncIterator[AsyncIterator[Line]]:
    folder = pathlib.Path(os.environ.get("HOLDBACK_TEST_TYPESCRIPT", ROOT / ".cache" / "typescript-client"))
    if not (folder / "dist" / "scenario.js").is_file():
        pytest.fail(f"no client in {folder}; make it with: make typescript", pytrace=False)
    scenario = json.dumps({"addresses": addresses, "options": options} | settings)
    child = await asyncio.create_subprocess_exec(
        str(folder / "node"),
        str(folder / "dist" / "scenario.js"),
        scenario,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"HOLDBACK_PROTOS": str(ROOT / "protos")},
    )

    async def lines() -> AsyncIterator[Line]:
        assert child.stdout is not None
        async for line in child.stdout:
            yield json.loads(line)

    try:
        yield lines()
        assert await asyncio.wait_for(child.wait(), 60) == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@contextlib.asynccontextmanager
async def python(addresses: Sequence[str], options: Line, **settings: Any) -> AsyncIterator[AsyncIterator[Line]]:
    timeout_s = settings["timeoutMs"] / 1000 if "timeoutMs" in settings else None
    retries = {"max_retries": settings["maxRetries"]} if "maxRetries" in settings else {}
    api_key = settings.get("apiKey")
    async with AsyncClient(addresses, timeout_s=timeout_s, api_key=api_key, **retries) as client:
        yield python_lines(client, python_options(options), settings.get("leaveAfter"))


async def python_lines(client: AsyncClient, options: GenerateOptions, leave_after: int | None) -> AsyncIterator[Line]:
    num_pieces = 0
    try:
        async with client.stream(**options) as stream:
            async for piece in stream:
                reason = {} if piece.finish_reason is None else {"finishReason": piece.finish_reason.name}
                yield {"piece": {"index": piece.index, "text": piece.text, "tokenIds": [*piece.token_ids]} | reason}
                num_pieces += 1
                if num_pieces == leave_after:
                    stream.close()
                    yield {"left": True}
                    return
        assert stream.usage is not None
        prompt, completion, cached = (
            stream.usage.prompt_tokens,
            stream.usage.completion_tokens,
            stream.usage.cached_tokens,
        )
        yield {"usage": {"promptTokens": prompt, "completionTokens": completion, "cachedTokens": cached}}
    except HoldbackError as error:
        yield {"error": described(error)}


def described(error: HoldbackError) -> Line:
    known = {"code": rpc.STATUS_CODES[type(error)].name, "reason": error.reason.name}
    fields = {name: getattr(error, name, "") for name in ("field", "value", "limit")}
    retry = error.retry_after_s * 1000 if isinstance(error, ResourceExhaustedError) else None
    return known | fields | {"retryAfterMs": retry}


def python_options(options: Line) -> GenerateOptions:
    names = {"prompt": "prompt", "tokenIds": "token_ids", "maxTokens": "max_tokens", "ignoreEos": "ignore_eos"}
    return {names.get(name, name): value for name, value in options.items()}  # type: ignore[return-value]


@pytest.fixture(params=[python, typescript])
def scenario(request: pytest.FixtureRequest) -> Scenario:
    chosen: Scenario = request.param
    return chosen


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow_stack(stack_arguments: Mapping[str, list[str]]) -> AsyncIterator[LocalStack]:
    """A pool whose streams take seconds."""
    arguments = slow(stack_arguments)
    async with LocalStack(arguments) as running:
        await running.wait_until_ready()
        yield running


def slow(arguments: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {**arguments, "executor": [*arguments["executor"], "--simulated-decode-us", str(DECODE_US)]}


def generation(num_tokens: int, **options: Any) -> Line:
    return {"tokenIds": PROMPT, "maxTokens": num_tokens, "ignoreEos": True, "temperature": 0, **options}


def greedy(num_tokens: int) -> list[int]:
    return expected_tokens(PROMPT, num_tokens, VOCAB_SIZE)


def pieces_of(lines: Sequence[Line]) -> tuple[list[int], str]:
    """All tokens, and the text."""
    pieces = [line["piece"] for line in lines if "piece" in line]
    return [token for piece in pieces for token in piece["tokenIds"]], "".join(piece["text"] for piece in pieces)


async def until_nothing_runs(stack: LocalStack) -> None:
    async with asyncio.timeout(60), rpc.create_channel(stack.scheduler_address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        while True:
            load = await stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=60)
            if load.num_running + load.num_waiting == 0:
                return


async def all_lines(running: contextlib.AbstractAsyncContextManager[AsyncIterator[Line]]) -> list[Line]:
    async with running as lines:
        return [line async for line in lines]


async def test_a_stream_is_the_whole_answer_in_pieces(slow_stack: LocalStack, scenario: Scenario) -> None:
    lines = await all_lines(scenario([slow_stack.gateway_address], generation(12)))
    async with AsyncClient(slow_stack.gateway_address, timeout_s=60) as client:
        whole = await client.generate(token_ids=PROMPT, max_tokens=12, ignore_eos=True, temperature=0)
    assert pieces_of(lines) == (greedy(12), whole.text)
    assert lines[-2]["piece"]["finishReason"] == "LENGTH"
    assert lines[-1]["usage"]["promptTokens"] == len(PROMPT)
    assert lines[-1]["usage"]["completionTokens"] == 12


async def test_a_stream_that_is_left_frees_what_it_used(slow_stack: LocalStack, scenario: Scenario) -> None:
    lines = await all_lines(scenario([slow_stack.gateway_address], generation(240), leaveAfter=1))
    assert lines[-1] == {"left": True}
    await until_nothing_runs(slow_stack)


async def test_a_deadline_ends_the_stream_on_both_sides(slow_stack: LocalStack, scenario: Scenario) -> None:
    lines = await all_lines(scenario([slow_stack.gateway_address], generation(240), timeoutMs=1500))
    assert lines[-1]["error"]["code"] == "DEADLINE_EXCEEDED"
    await until_nothing_runs(slow_stack)


@pytest.mark.parametrize(
    ("options", "code", "reason", "field", "value"),
    [
        ({"tokenIds": [VOCAB_SIZE]}, "INVALID_ARGUMENT", "TOKEN_OUT_OF_VOCABULARY", "token_ids[0]", str(VOCAB_SIZE)),
        ({"tokenIds": [5], "temperature": -1}, "INVALID_ARGUMENT", "INVALID_FIELD", "sampling.temperature", "-1.0"),
        ({"tokenIds": [5], "model": "none"}, "NOT_FOUND", "MODEL_NOT_FOUND", "", ""),
    ],
)
async def test_an_error_says_what_is_wrong(
    slow_stack: LocalStack, scenario: Scenario, options: Line, code: str, reason: str, field: str, value: str
) -> None:
    (line,) = await all_lines(scenario([slow_stack.gateway_address], options))
    told = {name: line["error"][name] for name in ("code", "reason", "field", "value")}
    assert told == {"code": code, "reason": reason, "field": field, "value": value}
    assert bool(line["error"]["limit"]) == bool(field)


async def test_a_refusal_says_when_to_try_again_and_is_tried_again(scenario: Scenario) -> None:
    full = Answer(error=ResourceExhaustedError("the queue is full", retry_after_s=0.25))
    async with MockGateway(full, full, Answer("a")) as gateway:
        (line,) = await all_lines(scenario([gateway.address], {"prompt": "Hi"}, maxRetries=0))
        assert (line["error"]["reason"], line["error"]["retryAfterMs"]) == ("QUEUE_FULL", 250)
        assert pieces_of(await all_lines(scenario([gateway.address], {"prompt": "Hi"})))[1] == "a"


async def test_the_key_goes_along(scenario: Scenario) -> None:
    async with MockGateway(Answer("a"), api_key="key-1") as gateway:
        assert pieces_of(await all_lines(scenario([gateway.address], {"prompt": "Hi"}, apiKey="key-1")))[1] == "a"
        (line,) = await all_lines(scenario([gateway.address], {"prompt": "Hi"}, apiKey="key-2"))
    assert (line["error"]["code"], line["error"]["reason"]) == ("UNAUTHENTICATED", "UNAUTHENTICATED")


async def test_a_refused_field_is_not_tried_again(scenario: Scenario) -> None:
    async with MockGateway(Answer(error=InvalidArgumentError.of("n", 0, "[1, 128]")), Answer("a")) as gateway:
        await all_lines(scenario([gateway.address], {"prompt": "Hi"}))
        assert len(gateway.calls) == 1


async def test_a_stream_goes_on_when_its_gateway_is_killed(
    stack_arguments: Mapping[str, list[str]], scenario: Scenario
) -> None:
    num_tokens = 100
    async with LocalStack(slow(stack_arguments)) as stack:
        await stack.wait_until_ready()
        second = await stack.spawn("gateway-2", "gateway", ["--scheduler", stack.scheduler_address])
        await second.wait_for_ports()
        addresses = [stack.gateway_address, rpc.format_address("127.0.0.1", second.port)]
        async with AsyncClient(addresses[1], timeout_s=60) as client:  # it serves, too
            whole = await client.generate(token_ids=PROMPT, max_tokens=num_tokens, ignore_eos=True, temperature=0)
        async with scenario(addresses, generation(num_tokens)) as lines:
            first = await anext(lines)
            stack.gateway.child.kill()
            rest = [line async for line in lines]
    assert pieces_of([first, *rest]) == (greedy(num_tokens), whole.text)
    assert rest[-1]["usage"]["completionTokens"] == num_tokens
    assert rest[-1]["usage"]["promptTokens"] == len(PROMPT)
