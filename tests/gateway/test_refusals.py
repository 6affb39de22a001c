"""What is refused before it reaches a scheduler, whereafter the next request is served."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from gateway.server import GatewayServer
from holdback import AsyncClient
from holdback.errors import (
    AlreadyExistsError,
    ErrorReason,
    InvalidArgumentError,
    NotFoundError,
)
from holdback.types import FinishReason
from holdback.v1 import inference_pb2
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.small_tokenizers import make_tokenizer, save_directory
from tests.gateway.texts import EOS, collect, ids_of

pytestmark = pytest.mark.loopback


async def test_a_prompt_longer_than_the_model_is_refused_before_it_is_copied(gateway: GatewayServer) -> None:
    prompt = inference_pb2.Generation(token_ids=inference_pb2.TokenIds(token_ids=[5] * 64))
    with pytest.raises(InvalidArgumentError, match="prompt has 64 tokens"):
        await gateway.pools.select("toy").tokenize(prompt)


@pytest.mark.case("B17")
async def test_an_id_that_is_alive_is_refused_and_free_again_afterwards(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    first = asyncio.create_task(client.generate("x", request_id="job-7"))
    add = await scheduler.next_add()
    with pytest.raises(AlreadyExistsError, match="request_id is 'job-7', which is alive"):
        await client.generate("x", request_id="job-7")
    scheduler.tokens(add.handle, 0, [*ids_of("a" * 10), EOS])
    scheduler.ended(add.handle)
    assert (await first).usage.completion_tokens == 11
    scheduler.answer = [EOS]
    assert (await client.generate("x", request_id="job-7")).request_id == "job-7"


async def test_wrong_requests_are_refused_before_anything_is_submitted(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^sampling.top_p is 1.5; allowed: \[0, 1\]$") as caught:
        await client.generate("x", top_p=1.5)
    assert (caught.value.field, caught.value.value, caught.value.limit) == ("sampling.top_p", "1.5", "[0, 1]")
    with pytest.raises(NotFoundError, match="model is 'other', which is not served; allowed: toy"):
        await client.generate("x", model="other")
    with pytest.raises(InvalidArgumentError, match=r"token_ids\[1\] is 512; allowed: \[0, 512\)"):
        await collect(client.stream(token_ids=[1, 512]))
    assert scheduler.adds.empty()


@pytest.mark.case("B10", "B50")
@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt": ""}, ErrorReason.PROMPT_EMPTY),
        ({"token_ids": []}, ErrorReason.PROMPT_EMPTY),
        ({"messages": []}, ErrorReason.INVALID_FIELD),
        ({"prompt": "x", "max_tokens": 0}, ErrorReason.INVALID_FIELD),
        ({"prompt": "x", "max_tokens": 0, "echo": True}, ErrorReason.INVALID_FIELD),
        ({"token_ids": [5] * 64}, ErrorReason.PROMPT_TOO_LONG),
    ],
)
async def test_a_prompt_that_cannot_be_run_is_refused_and_the_next_one_is_served(
    client: AsyncClient, scheduler: ScriptedScheduler, prompt: dict[str, object], reason: ErrorReason
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await client.generate(**prompt)  # type: ignore[arg-type]
    assert caught.value.reason is reason
    assert scheduler.adds.empty()
    scheduler.answer = [EOS]
    assert (await client.generate("x")).finish_reason is FinishReason.STOP


@pytest.mark.case("B10")
async def test_a_prompt_one_below_the_limit_gets_one_token(client: AsyncClient, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = ids_of("a")
    scheduler.finish_reason = FinishReason.LENGTH
    answer = await client.generate(token_ids=[5] * 63)
    assert (answer.usage.completion_tokens, answer.finish_reason) == (1, FinishReason.LENGTH)
    assert (await scheduler.next_add()).spec.sampling.max_tokens == 1


@pytest.mark.case("B51")
@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ("raise_exception('no system role here')", "no system role here"),
        ("raise_exception('half \\ud83d')", r"half \\ud83d"),
        ("'half \\ud83d'", "half of a surrogate pair"),
    ],
)
async def test_a_template_that_refuses_reaches_no_scheduler(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler, tmp_path: pathlib.Path, refusal: str, words: str
) -> None:
    template = "{% if messages[0].role == 'system' %}{{ " + refusal + " }}{% endif %}x"
    directory = save_directory(tmp_path / "strict", make_tokenizer("byte_level"), chat_template=template)
    gateway = await make_gateway(scheduler=scheduler.target, tokenizer=directory)
    async with AsyncClient(f"127.0.0.1:{gateway.port}", timeout_s=60) as client:
        with pytest.raises(InvalidArgumentError, match=words) as caught:
            await client.generate(messages=[{"role": "system", "content": "x"}])
        assert caught.value.reason is ErrorReason.CHAT_TEMPLATE_FAILED
        assert scheduler.adds.empty()
        scheduler.answer = [EOS]
        await client.generate(messages=[{"role": "user", "content": "x"}])
