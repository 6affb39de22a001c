"""What applications see: answers, streams, endings and refusals, over real gRPC before a scripted scheduler."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.server import GatewayServer
from holdback import AsyncClient, GenerationStream, Piece
from holdback.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    ErrorReason,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from holdback.types import FinishReason, TokenLogprobs, Usage
from tests.gateway.scripted_scheduler import MODEL, ScriptedScheduler
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer, save_directory, with_bos

pytestmark = pytest.mark.loopback

EOS = 2


@pytest.fixture
def tokenizer() -> Tokenizer:
    return make_tokenizer("byte_level")


def ids_of(text: str) -> list[int]:
    """One token for each byte."""
    return byte_ids(make_tokenizer("byte_level"), text.encode())


async def collect(stream: GenerationStream) -> list[Piece]:
    return [piece async for piece in stream]


async def extend(pieces: list[Piece], stream: GenerationStream) -> None:
    """Collects into a list that outlives an error."""
    async for piece in stream:
        pieces.append(piece)


def text_of(pieces: list[Piece], index: int = 0) -> str:
    return "".join(piece.text for piece in pieces if piece.index == index)


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


@pytest.mark.case("B56")
async def test_a_client_that_goes_away_ends_its_requests_at_once(
    client: AsyncClient, scheduler: ScriptedScheduler
) -> None:
    stream = client.stream("x", request_id="gone", max_tokens=20)
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, ids_of("a"))
    assert (await anext(stream)).text == "a"
    stream.close()
    assert await scheduler.next_abort() == ("gone", 0)
    waiting = asyncio.create_task(client.generate("x", request_id="queued", max_tokens=20))
    await scheduler.next_add()
    waiting.cancel()
    assert await scheduler.next_abort() == ("queued", 0)


@pytest.mark.case("B56")
async def test_a_deadline_is_told_to_the_scheduler_and_ends_the_request(
    gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    async with AsyncClient(f"127.0.0.1:{gateway.port}", timeout_s=2) as client:
        with pytest.raises(DeadlineExceededError):
            await client.generate("x", request_id="late", max_tokens=20)
    add = await scheduler.next_add()
    assert 1 <= add.spec.deadline_ms <= 2000
    assert await scheduler.next_abort() == ("late", 0)


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
async def test_a_template_that_refuses_reaches_no_scheduler(
    make_gateway: Callable[..., Any], scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}x"
    directory = save_directory(tmp_path / "strict", make_tokenizer("byte_level"), chat_template=template)
    gateway = await make_gateway(scheduler=scheduler.target, tokenizer=directory)
    async with AsyncClient(f"127.0.0.1:{gateway.port}", timeout_s=60) as client:
        with pytest.raises(InvalidArgumentError, match="no system role here") as caught:
            await client.generate(messages=[{"role": "system", "content": "x"}])
        assert caught.value.reason is ErrorReason.CHAT_TEMPLATE_FAILED
        assert scheduler.adds.empty()
        scheduler.answer = [EOS]
        await client.generate(messages=[{"role": "user", "content": "x"}])


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
