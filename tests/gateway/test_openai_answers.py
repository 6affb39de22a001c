"""What OpenAI's own client gets from the HTTP API: answers, streams and refusals, before a scripted scheduler."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from typing import Any

import httpx
import openai as openai_package
import pytest
from openai import AsyncOpenAI

from gateway.openai.shapes import ChatCompletion, ChatCompletionChunk, Completion, ModelList
from gateway.server import GatewayServer
from holdback.client import AsyncClient
from holdback.errors import ResourceExhaustedError
from holdback.types import FinishReason, TokenLogprobs
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer
from tests.prometheus import Scrape

pytestmark = pytest.mark.loopback

EOS = 2
HI: Any = [{"role": "user", "content": "hi"}]


def ids_of(text: str) -> list[int]:
    """One token for each byte."""
    return byte_ids(make_tokenizer("byte_level"), text.encode())


def events_of(body: str) -> list[Any]:
    """The data of server-sent events; the last one must be `[DONE]`."""
    *events, rest = body.split("\n\n")
    assert rest == ""
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def test_a_completion_has_text_reason_usage_and_the_fingerprint(
    openai: AsyncOpenAI, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [*ids_of(" yes"), EOS]
    answer = await openai.completions.create(model="alias", prompt="Hello", seed=7)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (" yes", "stop", 0, None)
    assert (answer.object, answer.model, answer.system_fingerprint) == ("text_completion", "toy", "toy-1")
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (5, answer.usage.prompt_tokens + 5)
    add = await scheduler.next_add()
    assert add.spec.request_id == answer.id == answer._request_id
    assert (add.spec.sampling.max_tokens, add.spec.sampling.temperature, add.spec.sampling.seed) == (16, 1.0, 7)


async def test_a_chat_is_rendered_and_answered_with_a_message(
    openai: AsyncOpenAI, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [*ids_of("yes"), EOS]
    answer = await openai.chat.completions.create(model="toy", messages=HI, max_completion_tokens=8)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "yes", "stop")
    assert answer.object == "chat.completion"
    add = await scheduler.next_add()
    expected = make_tokenizer("byte_level").encode("<s><|user|>user: hi<|end|>assistant:", add_special_tokens=False)
    assert list(add.spec.prompt_token_ids) == expected.ids
    assert add.spec.sampling.max_tokens == 8


async def test_a_chat_without_a_limit_has_the_pools(openai: AsyncOpenAI, scheduler: ScriptedScheduler) -> None:
    scheduler.answer, scheduler.default_max_tokens = [EOS], 16
    await openai.chat.completions.create(model="toy", messages=HI)
    assert (await scheduler.next_add()).spec.sampling.max_tokens == 16


async def test_a_streamed_chat_is_what_the_whole_one_is_in_pieces(
    openai: AsyncOpenAI, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [*ids_of("a \U0001f600 한!"), EOS]
    stream = await openai.chat.completions.create(model="toy", messages=HI, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a \U0001f600 한!"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)
    whole = await openai.chat.completions.create(model="toy", messages=HI)
    assert whole.choices[0].message.content == "a \U0001f600 한!"


async def test_a_streamed_completion_is_what_the_whole_one_is_in_pieces(
    openai: AsyncOpenAI, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [*ids_of(" a \U0001f600!"), EOS]
    stream = await openai.completions.create(model="toy", prompt="x", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == " a \U0001f600!"
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_answers_have_the_documented_shapes(path: str, http: httpx.AsyncClient, scheduler: Any) -> None:
    scheduler.answer = [*ids_of('"q"\n'), EOS]
    chat = "chat" in path
    body = {"messages": HI} if chat else {"prompt": ["a", "b"]}
    body |= {"n": 2, "stop": ["never"]}
    whole = (await http.post(path, json=body)).text
    (ChatCompletion if chat else Completion).model_validate_json(whole, strict=True)
    streamed = await http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(streamed.text)
    for event in events:
        (ChatCompletionChunk if chat else Completion).model_validate_json(json.dumps(event), strict=True)
    assert [text_of(events, index) for index in range(2 if chat else 4)] == ['"q"\n'] * (2 if chat else 4)


@pytest.mark.case("B46")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("answer", [[*ids_of("ab"), EOS], [EOS]])
async def test_usage_is_in_a_stream_only_when_asked_for(
    path: str, answer: list[int], http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = answer
    body: dict[str, Any] = {"messages": HI} if "chat" in path else {"prompt": "x"}
    body |= {"stream": True, "n": 2}
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        events = events_of((await http.post(path, json=body | options)).text)
        assert all("usage" not in event for event in events)
    asked = body | {"stream_options": {"include_usage": True}}
    *events, last = events_of((await http.post(path, json=asked)).text)
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    whole = (await http.post(path, json={key: value for key, value in body.items() if key != "stream"})).json()
    assert last["usage"] == whole["usage"]
    assert last["usage"]["completion_tokens"] == 2 * len(answer)
    refused = await http.post(path, json=body | {"stream": False, "stream_options": {"include_usage": True}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")


@pytest.mark.case("B47")
@pytest.mark.parametrize("limit", [1, 5, 20])
async def test_the_length_limit_counts_exactly_everywhere(
    limit: int, openai: AsyncOpenAI, http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer, scheduler.finish_reason = ids_of("x" * limit), FinishReason.LENGTH
    answer = await openai.completions.create(
        model="toy", prompt=[5, 6, 7], max_tokens=limit, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (limit, limit + 3)
    assert answer.choices[0].finish_reason == "length"
    stream = await openai.completions.create(
        model="toy", prompt=[5, 6, 7], max_tokens=limit, stream=True, stream_options={"include_usage": True}
    )
    last = [chunk async for chunk in stream][-1]
    assert last.usage is not None
    assert last.usage.completion_tokens == limit
    metrics = Scrape((await http.get("/metrics")).text)
    assert metrics.of("vllm:generation_tokens_total", model_name="toy") == 2 * limit
    assert metrics.of("vllm:prompt_tokens_total", model_name="toy") == 6
    assert metrics.of("vllm:request_success_total", finished_reason="length") == 2
    assert metrics.of("vllm:request_success_total") == 2


@pytest.mark.case("B38")
@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["red", " fo", "x ru", "ns", " far"], "fox run", "red "),
        (["red", " fo", "g", None], "fox run", "red fog"),
        (["a <", "/e", None], "</end>", "a </e"),
    ],
)
async def test_a_stop_string_is_never_sent_and_nothing_else_is_lost(
    pieces: list[str | None], stop: str, text: str, http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [token for piece in pieces for token in ([EOS] if piece is None else ids_of(piece))]
    body = {"prompt": "x", "stop": stop, "max_tokens": 40}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    events = events_of((await http.post("/v1/completions", json=body | {"stream": True})).text)
    assert choice["text"] == text_of(events) == text
    assert choice["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "stop"
    expected = stop if text == "red " else None
    assert choice["stop_reason"] == events[-1]["choices"][0]["stop_reason"] == expected


@pytest.mark.case("B37")
async def test_a_stop_token_ends_with_stop_and_is_told(openai: AsyncOpenAI, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [4, 5, EOS, 9, 4]
    answer = await openai.completions.create(
        model="toy", prompt="x", extra_body={"ignore_eos": True, "stop_token_ids": [9]}
    )
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (4, "stop")
    assert answer.choices[0].model_extra == {"stop_reason": 9}


@pytest.mark.case("B41", "B43")
async def test_characters_that_are_cut_by_tokens_are_whole(
    http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    tokenizer = make_tokenizer("byte_level")
    prompt = byte_ids(tokenizer, b"abc \xf0\x9f")
    scheduler.answer = [*byte_ids(tokenizer, b"\x98\x80!"), EOS]
    body = {"prompt": prompt}
    whole = (await http.post("/v1/completions", json=body)).json()
    events = events_of((await http.post("/v1/completions", json=body | {"stream": True})).text)
    assert whole["choices"][0]["text"] == text_of(events) == "\U0001f600!"
    assert whole["usage"]["completion_tokens"] == 4


async def test_several_prompts_have_choices_of_their_own_in_order(
    openai: AsyncOpenAI, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [*ids_of("y"), EOS]
    answer = await openai.completions.create(model="toy", prompt=["a", "bb", "ccc"], n=2, echo=True)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "ay"),
        (1, "ay"),
        (2, "bby"),
        (3, "bby"),
        (4, "cccy"),
        (5, "cccy"),
    ]
    adds = [await scheduler.next_add() for _ in range(6)]
    assert answer.usage is not None
    prompts = {add.spec.request_id.partition("/")[0]: len(add.spec.prompt_token_ids) for add in adds}
    assert list(prompts) == [f"{answer.id}-{number}" for number in range(3)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(prompts.values()), 12)


async def test_one_wrong_prompt_of_several_is_named_and_none_is_run(
    openai: AsyncOpenAI, scheduler: ScriptedScheduler
) -> None:
    with pytest.raises(openai_package.BadRequestError) as caught:
        await openai.completions.create(model="toy", prompt=[[5], [6, 600]])
    assert (caught.value.param, caught.value.code) == ("prompt[1][1]", "token_out_of_vocabulary")
    first = await scheduler.next_add()
    assert (await scheduler.next_abort())[0] == first.spec.request_id


@pytest.mark.case("B48")
async def test_log_probabilities_of_completions_are_aligned_in_both_modes(
    http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    tokens = [*ids_of("ré"), *ids_of(" fox run"), 0]
    body = {"prompt": "x", "logprobs": 2, "stop": "fox run", "max_tokens": 40}

    async def scripted() -> None:
        add = await scheduler.next_add()
        scheduler.started(add.handle)
        for index, token in enumerate(tokens):
            entry = TokenLogprobs(token, -0.5 - index, (token, 7), (-0.5 - index, float("-inf")))
            scheduler.tokens(add.handle, index, [token], [entry])

    (whole, _), (streamed, _) = [
        await asyncio.gather(http.post("/v1/completions", json=body | {"stream": stream}), scripted())
        for stream in (False, True)
    ]
    (choice,) = whole.json()["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "ré "
    assert logprobs["tokens"] == ["r", "bytes:\\xc3", "bytes:\\xa9", *" fox run"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert logprobs["token_logprobs"] == [-0.5 - index for index in range(11)]
    assert logprobs["top_logprobs"][0] == {"r": -0.5, make_tokenizer("byte_level").id_to_token(7): -9999.0}
    parts = [event["choices"][0]["logprobs"] for event in events_of(streamed.text)]
    joined = {key: [entry for part in parts if part for entry in part[key]] for key in logprobs}
    assert joined == logprobs


@pytest.mark.case("B48")
async def test_log_probabilities_of_a_chat_have_the_bytes_of_each_token(
    openai: AsyncOpenAI, scheduler: ScriptedScheduler
) -> None:
    tokens = [*ids_of("é"), EOS]
    asked = asyncio.create_task(openai.chat.completions.create(model="toy", messages=HI, logprobs=True, top_logprobs=1))
    add = await scheduler.next_add()
    assert add.spec.sampling.num_logprobs == 1
    entries = [TokenLogprobs(token, -1.0, (5,), (-0.25,)) for token in tokens]
    scheduler.tokens(add.handle, 0, tokens, entries)
    scheduler.ended(add.handle)
    (choice,) = (await asked).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    shown = [(entry.token, entry.logprob, entry.bytes) for entry in choice.logprobs.content]
    assert shown == [("bytes:\\xc3", -1.0, [0xC3]), ("bytes:\\xa9", -1.0, [0xA9]), ("</s>", -1.0, list(b"</s>"))]
    assert [entry.top_logprobs[0].logprob for entry in choice.logprobs.content] == [-0.25] * 3


@pytest.mark.case("B17")
async def test_the_clients_id_is_echoed_and_the_gateway_makes_its_own(
    http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    calls = [
        asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "job-7"}))
        for _ in range(2)
    ]
    adds = [await scheduler.next_add() for _ in calls]
    for add in adds:
        scheduler.tokens(add.handle, 0, [*ids_of("y"), EOS])
        scheduler.ended(add.handle)
    responses = [await call for call in calls]
    assert [response.headers["x-request-id"] for response in responses] == ["job-7"] * 2
    assert {response.json()["id"] for response in responses} == {add.spec.request_id for add in adds}
    assert len({add.spec.request_id for add in adds}) == 2


async def test_models_are_listed_with_their_aliases_and_found(openai: AsyncOpenAI, http: httpx.AsyncClient) -> None:
    assert [model.id async for model in openai.models.list()] == ["toy", "alias"]
    model = await openai.models.retrieve("alias")
    assert (model.id, model.owned_by, model.model_extra) == ("alias", "holdback", {"root": "toy", "max_model_len": 64})
    ModelList.model_validate_json((await http.get("/v1/models")).text, strict=True)
    for name in ("none", "a/b", "x" * 300):
        with pytest.raises(openai_package.APIStatusError) as caught:
            await openai.models.retrieve(name)
        assert caught.value.status_code == (400 if len(name) > 256 else 404)


async def test_an_unknown_model_is_a_404_with_openais_code(openai: AsyncOpenAI) -> None:
    with pytest.raises(openai_package.NotFoundError) as caught:
        await openai.chat.completions.create(model="gpt-4", messages=HI)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_a_429_that_says_when_to_come_back(
    stream: bool, http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x", "stream": stream}))
    add = await scheduler.next_add()
    scheduler.ended(add.handle, FinishReason.ERROR, error=ResourceExhaustedError("full", retry_after_s=2.5))
    response = await asked
    assert response.status_code == 429
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2500")
    assert response.json()["error"]["code"] == "queue_full"


async def test_a_request_that_somebody_ends_by_its_id_tells_abort(
    openai: AsyncOpenAI, http_gateway: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    stream = await _begun_stream(openai, scheduler)
    chunk = await anext(stream)
    async with AsyncClient(f"127.0.0.1:{http_gateway.port}") as client:
        await client.abort(chunk.id)
    assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "abort"


async def _begun_stream(openai: AsyncOpenAI, scheduler: ScriptedScheduler) -> Any:
    asking = asyncio.create_task(openai.completions.create(model="toy", prompt="x", stream=True))
    add = await scheduler.next_add()
    scheduler.tokens(add.handle, 0, ids_of("a"))
    return aiter(await asking)


@pytest.mark.case("B17")
async def test_an_id_of_the_body_comes_back_whatever_is_in_it(
    http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [EOS]
    response = await http.post("/v1/completions", json={"prompt": "x", "request_id": "job \u00e9\r\nSet-Cookie: x"})
    assert response.status_code == 200
    assert urllib.parse.unquote(response.headers["x-request-id"]) == "job \u00e9\r\nSet-Cookie: x"
    assert "set-cookie" not in response.headers
