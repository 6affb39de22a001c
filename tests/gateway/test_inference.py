"""What applications see: answers and streams, over real gRPC before a scripted scheduler."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from holdback import AsyncClient
from holdback.errors import (
    InternalError,
    InvalidArgumentError,
    NotFoundError,
)
from holdback.types import FinishReason, TokenLogprobs, Usage
from tests.gateway.scripted_scheduler import MODEL, ScriptedScheduler
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer, save_directory, with_bos
from tests.gateway.texts import EOS, collect, ids_of, text_of

pytestmark = pytest.mark.loopback


@pytest.fixture
def tokenizer() -> Tokenizer:
    return make_tokenizer("byte_level")


async def test_a_complete_answer_has_text_tokens_reason_seed_and_usage(
    client: AsyncClient, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    scheduler.answer = [*ids_of(" yes"), EOS]
    answer = await client.generate("Hello world", seed=7)
    assert (answer.text, answer.finish_reason, answer.seed, answer.model) == (" yes", FinishReason.STOP, 7, "toy")
    assert answer.token_ids == tuple(scheduler.answer)
    num_prompt_tokens = len(tokenizer.encode("Hello world").ids)
    assert answer.usage == Usage(num_prompt_tokens, 5, 0)
    add = await scheduler.next_add()
    assert list(add.spec.prompt_token_ids) == tokenizer.encode("Hello world").ids
    assert (add.spec.request_id, add.spec.generation, add.HasField("resubmission")) == (answer.request_id, 0, False)
    assert (add.spec.sampling.seed, add.spec.sampling.max_tokens, add.spec.sampling.temperature) == (7, 16, 1.0)


async def test_a_stream_is_what_the_complete_answer_is_in_pieces(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [*ids_of("a \U0001f600!"), EOS]
    stream = client.stream("Hi", seed=-(2**63), request_id="mine")
    pieces = await collect(stream)
    assert text_of(pieces) == "a \U0001f600!"
    assert [token for piece in pieces for token in piece.token_ids] == scheduler.answer
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [FinishReason.STOP]
    assert (stream.request_id, stream.model, stream.seed) == ("mine", "toy", -(2**63))
    assert stream.usage == Usage(stream.prompt_tokens, 8, 0)
    answer = await client.generate("Hi", seed=-(2**63))
    assert (answer.text, answer.usage) == (text_of(pieces), stream.usage)


async def test_a_chat_is_rendered_with_the_models_template_and_gets_no_second_bos(
    client: AsyncClient, scheduler: ScriptedScheduler, tokenizer: Tokenizer
) -> None:
    scheduler.answer = [EOS]
    await client.generate(messages=[{"role": "user", "content": "hi"}])
    rendered = "<s><|user|>user: hi<|end|>assistant:"
    expected = tokenizer.encode(rendered, add_special_tokens=False).ids
    assert list((await scheduler.next_add()).spec.prompt_token_ids) == expected
    assert await client.tokenize(messages=[{"role": "user", "content": "hi"}]) == expected


@pytest.mark.case("B52")
@pytest.mark.parametrize("bos", ["{{ bos_token }}", ""])
async def test_a_tokenizer_that_adds_bos_leaves_it_to_the_template_of_a_chat(
    bos: str, tmp_path: pathlib.Path, scheduler: ScriptedScheduler, make_gateway: Callable[..., Any]
) -> None:
    template = bos + "{{ messages[0]['content'] }}"
    directory = save_directory(tmp_path / "bos", with_bos(make_tokenizer("byte_level")), chat_template=template)
    gateway = await make_gateway(scheduler=scheduler.target, tokenizer=directory)
    hi = make_tokenizer("byte_level").encode("hi").ids
    async with AsyncClient(f"127.0.0.1:{gateway.port}") as client:
        assert await client.tokenize("hi") == [1, *hi]
        chat = await client.tokenize(messages=[{"role": "user", "content": "hi"}])
    assert chat == ([1, *hi] if bos else hi)


async def test_token_ids_are_taken_as_they_are(client: AsyncClient, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    answer = await client.generate(token_ids=[5, 511, 0])
    assert list((await scheduler.next_add()).spec.prompt_token_ids) == [5, 511, 0]
    assert answer.usage == Usage(3, 1, 0)
    assert answer.text == ""


async def test_a_seed_is_drawn_and_told_where_the_client_gave_none(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [EOS]
    seeds = []
    for _ in range(2):
        answer = await client.generate("Hi")
        assert (await scheduler.next_add()).spec.sampling.seed == answer.seed
        seeds.append(answer.seed)
    assert seeds[0] != seeds[1]


async def test_choices_are_requests_of_their_own_with_ascending_seeds(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    pending = asyncio.create_task(client.generate("Hi", n=3, seed=2**63 - 2, request_id="three"))
    adds = [await scheduler.next_add() for _ in range(3)]
    assert [add.spec.request_id for add in adds] == ["three/0", "three/1", "three/2"]
    assert [add.spec.sampling.seed for add in adds] == [2**63 - 2, 2**63 - 1, -(2**63)]
    for index, add in reversed(list(enumerate(adds))):
        scheduler.started(add.handle, num_cached_tokens=index)
        scheduler.tokens(add.handle, 0, [*ids_of("abc"[index]), EOS])
        scheduler.ended(add.handle)
    answer = await pending
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a"), (1, "b"), (2, "c")]
    assert answer.usage.completion_tokens == 6
    assert answer.usage.cached_tokens == 0


async def test_echo_puts_the_prompt_in_front_of_the_text(client: AsyncClient, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [*byte_ids(make_tokenizer("byte_level"), b"\x98\x80!"), EOS]
    prompt = byte_ids(make_tokenizer("byte_level"), b"abc \xf0\x9f")
    answer = await client.generate(token_ids=prompt, echo=True)
    assert answer.text == "abc \U0001f600!"
    pieces = await collect(client.stream(token_ids=prompt, echo=True, n=2))
    assert (text_of(pieces, 0), text_of(pieces, 1)) == (answer.text, answer.text)
    assert (await client.generate("Hello", echo=True)).text.startswith("Hello")


@pytest.mark.case("B43")
async def test_a_prompt_that_ends_within_a_character_does_not_leak_into_the_answer(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = byte_ids(make_tokenizer("byte_level"), b"\x98\x80!")
    scheduler.finish_reason = FinishReason.LENGTH
    prompt = byte_ids(make_tokenizer("byte_level"), b"abc \xf0\x9f")
    pieces = await collect(client.stream(token_ids=prompt, max_tokens=3))
    answer = await client.generate(token_ids=prompt, max_tokens=3)
    assert text_of(pieces) == answer.text == "\U0001f600!"
    assert answer.usage.completion_tokens == 3


@pytest.mark.case("B48")
async def test_log_probabilities_come_one_for_each_token(client: AsyncClient, scheduler: ScriptedScheduler) -> None:
    entries = [TokenLogprobs(token_id, -0.5, (token_id, 7), (-0.5, -1.5)) for token_id in ids_of("abc")]
    pending = asyncio.create_task(client.generate("x", num_logprobs=2, stop=["b"]))
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, ids_of("abc"), entries)
    choice = (await pending).choices[0]
    assert choice.text == "a"
    assert choice.logprobs == tuple(entries[:2])
    assert len(choice.token_ids) == 2


async def test_log_probabilities_that_were_asked_for_and_do_not_come_are_an_error(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    pending = asyncio.create_task(client.generate("x", num_logprobs=0))
    scheduler.tokens((await scheduler.next_add()).handle, 0, ids_of("a"))
    with pytest.raises(InternalError, match="log-probabilities"):
        await pending
    assert (await scheduler.next_abort())[1] == 0


async def test_tokens_and_text_go_there_and_back(client: AsyncClient, tokenizer: Tokenizer) -> None:
    token_ids = await client.tokenize("Hello \U0001f600")
    assert token_ids == tokenizer.encode("Hello \U0001f600").ids
    assert await client.detokenize(token_ids) == "Hello \U0001f600"
    assert await client.detokenize([*token_ids, EOS], keep_special_tokens=True) == "Hello \U0001f600</s>"
    assert await client.detokenize(token_ids[:-1]) == "Hello \ufffd"
    assert await client.tokenize("") == []
    with pytest.raises(InvalidArgumentError, match=r"token_ids\[0\] is 512"):
        await client.detokenize([512])


async def test_models_are_listed_and_found_by_name_alias_and_default(client: AsyncClient) -> None:
    (model,) = await client.models()
    assert (model.name, model.aliases, model.info, model.default_max_tokens, model.is_ready) == (
        "toy",
        ("alias",),
        MODEL,
        16,
        True,
    )
    assert await client.model("alias") == await client.model("toy") == await client.model() == model
    with pytest.raises(NotFoundError):
        await client.model("nothing")
