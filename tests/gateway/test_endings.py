"""How answers end: stop strings and tokens, lengths, aborts, errors, and what a client has received before."""

from __future__ import annotations

import asyncio

import pytest

from holdback import AsyncClient, Piece
from holdback.errors import (
    ErrorReason,
    InternalError,
    NotFoundError,
    ResourceExhaustedError,
)
from holdback.types import FinishReason, Usage
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer
from tests.gateway.texts import EOS, collect, extend, ids_of, text_of

pytestmark = pytest.mark.loopback


@pytest.mark.case("B41")
async def test_a_character_that_max_tokens_cuts_is_the_same_in_both_modes(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = byte_ids(make_tokenizer("byte_level"), b"Hi \xf0\x9f\x98")
    scheduler.finish_reason = FinishReason.LENGTH
    pieces = await collect(client.stream("x", max_tokens=6))
    assert text_of(pieces) == (await client.generate("x", max_tokens=6)).text == "Hi \ufffd"


@pytest.mark.case("B47")
@pytest.mark.parametrize("max_tokens", [1, 5, 20])
async def test_the_length_limit_counts_exactly(
    client: AsyncClient, scheduler: ScriptedScheduler, max_tokens: int
) -> None:
    scheduler.answer = ids_of("x" * max_tokens)
    scheduler.finish_reason = FinishReason.LENGTH
    answer = await client.generate(token_ids=[5, 6], max_tokens=max_tokens, ignore_eos=True)
    assert (answer.usage, answer.finish_reason) == (Usage(2, max_tokens, 0), FinishReason.LENGTH)
    assert answer.usage.total_tokens == 2 + max_tokens
    stream = client.stream(token_ids=[5, 6], max_tokens=max_tokens, ignore_eos=True)
    await collect(stream)
    assert stream.usage == answer.usage


@pytest.mark.case("B38")
async def test_a_stop_string_ends_the_answer_and_the_request(client: AsyncClient, scheduler: ScriptedScheduler) -> None:
    pending = asyncio.create_task(client.generate("x", stop=["fox run"], request_id="stopped"))
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, ids_of("red fox runs far"))
    answer = await pending
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_string) == ("red ", FinishReason.STOP, "fox run")
    assert choice.token_ids == tuple(ids_of("red fox run"))
    assert answer.usage.completion_tokens == len("red fox run")
    assert await scheduler.next_abort() == ("stopped", 0)


@pytest.mark.case("B38")
@pytest.mark.parametrize(("text", "expected"), [("red fog", "red fog"), ("red fox runs", "red ")])
async def test_streams_withhold_what_may_become_a_stop_string_and_nothing_for_good(
    client: AsyncClient, scheduler: ScriptedScheduler, text: str, expected: str
) -> None:
    scheduler.answer = [*ids_of(text), EOS]
    pieces = await collect(client.stream("x", stop="fox run"))
    assert text_of(pieces) == expected
    assert (await client.generate("x", stop="fox run")).text == expected


@pytest.mark.case("B37")
async def test_a_stop_token_is_told_and_left_out_of_the_text_and_eos_is_not_told(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    comma = ids_of(",")[0]
    scheduler.answer = [*ids_of("a"), EOS, comma]
    answer = await client.generate("x", stop_token_ids=[comma], ignore_eos=True)
    assert (answer.text, answer.choices[0].stop_token_id) == ("a", comma)
    answer = await client.generate("x", stop_token_ids=[comma], keep_special_tokens=True)
    assert (answer.text, answer.choices[0].stop_token_id, answer.token_ids[-1]) == ("a", None, EOS)
    kept = await client.generate("x", stop_token_ids=[comma], ignore_eos=True, keep_special_tokens=True)
    assert kept.text == "a</s>"


async def test_an_answer_resumes_after_the_outputs_that_the_client_has(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    emoji = byte_ids(make_tokenizer("byte_level"), "\U0001f600".encode())
    received = [*ids_of("ab fo"), *emoji[:2]]
    stream = client.stream("x", output_token_ids=received, seed=3, stop=["fog"], max_tokens=20)
    pending = asyncio.create_task(collect(stream))
    add = await scheduler.next_add()
    assert list(add.spec.output_token_ids) == received
    assert (add.spec.sampling.seed, add.HasField("resubmission")) == (3, False)
    scheduler.tokens(add.handle, len(received), [*emoji[2:], EOS])
    pieces = await pending
    assert text_of(pieces) == "fo\U0001f600"
    assert stream.usage is not None
    assert stream.usage.completion_tokens == len(received) + 3


@pytest.mark.parametrize(
    ("received", "reason"),
    [(["a", EOS], FinishReason.STOP), (["a", "b", "c"], FinishReason.LENGTH), (["x", "y"], FinishReason.STOP)],
)
async def test_outputs_that_had_ended_the_answer_end_it_at_once(
    client: AsyncClient, scheduler: ScriptedScheduler, received: list[str | int], reason: FinishReason
) -> None:
    token_ids = [ids_of(entry)[0] if isinstance(entry, str) else entry for entry in received]
    answer = await client.generate("p", output_token_ids=token_ids, seed=1, max_tokens=3, stop=["xy"])
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), reason)
    assert answer.usage.completion_tokens == len(token_ids)
    assert scheduler.adds.empty()


async def test_abort_ends_an_answer_with_what_there_is(client: AsyncClient, scheduler: ScriptedScheduler) -> None:
    stream = client.stream("x", request_id="long", n=2)
    adds = [await scheduler.next_add() for _ in range(2)]
    scheduler.tokens(adds[0].handle, 0, ids_of("ab"))
    pieces = [await anext(stream)]
    await client.abort("long")
    pieces += await collect(stream)
    assert text_of(pieces) == "ab"
    assert [p.finish_reason for p in pieces if p.finish_reason] == [FinishReason.ABORT, FinishReason.ABORT]
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 2
    assert {await scheduler.next_abort(), await scheduler.next_abort()} == {("long/0", 0), ("long/1", 0)}
    with pytest.raises(NotFoundError, match="request_id is 'long'"):
        await client.abort("long")


async def test_an_error_of_the_scheduler_reaches_the_client_with_its_reason(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    pending = asyncio.create_task(client.generate("x"))
    add = await scheduler.next_add()
    scheduler.ended(add.handle, FinishReason.ERROR, error=ResourceExhaustedError("full", retry_after_s=2.5))
    with pytest.raises(ResourceExhaustedError, match="full") as caught:
        await pending
    assert caught.value.retry_after_s == 2.5
    pending = asyncio.create_task(client.generate("x"))
    add = await scheduler.next_add()
    numeric = InternalError("not finite", reason=ErrorReason.NUMERIC_ERROR)
    scheduler.ended(add.handle, FinishReason.ERROR, error=numeric)
    with pytest.raises(InternalError) as failed:
        await pending
    assert failed.value.reason is ErrorReason.NUMERIC_ERROR


@pytest.mark.case("B58")
async def test_a_stream_that_fails_gives_its_text_and_then_the_error_never_a_finish_reason(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    stream = client.stream("x", n=2, request_id="fails")
    adds = [await scheduler.next_add() for _ in range(2)]
    scheduler.tokens(adds[0].handle, 0, ids_of("ab"))
    scheduler.ended(adds[0].handle, FinishReason.ERROR, error=InternalError("broken"))
    pieces: list[Piece] = []
    with pytest.raises(InternalError, match="broken"):
        await extend(pieces, stream)
    assert text_of(pieces) == "ab"
    assert all(piece.finish_reason is None for piece in pieces)
    assert await scheduler.next_abort() == ("fails/1", 0)
