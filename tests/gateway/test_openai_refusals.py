"""What the HTTP API refuses as soon as model, tokenizer and template are asked, and what it makes of a BOS."""

from __future__ import annotations

import asyncio
import pathlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gateway.openai.shapes import ErrorAnswer
from tests.gateway.conftest import http_url, wait_until_ready
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer, save_directory, with_bos

pytestmark = pytest.mark.loopback

EOS = 2
HI: Any = [{"role": "user", "content": "hi"}]


def ids_of(text: str) -> list[int]:
    """One token for each byte."""
    return byte_ids(make_tokenizer("byte_level"), text.encode())


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "prompt_empty"),
    ({"prompt": []}, "prompt", "invalid_field"),
    ({"prompt": [""]}, "prompt", "prompt_empty"),
    ({"prompt": ["a", ""]}, "prompt[1]", "prompt_empty"),
    ({"prompt": [[]]}, "prompt", "prompt_empty"),
    ({"prompt": [512]}, "prompt[0]", "token_out_of_vocabulary"),
    ({"prompt": [5] * 64}, "prompt", "context_length_exceeded"),
    ({"logit_bias": {"512": 5}}, "logit_bias.512", "token_out_of_vocabulary"),
    ({"stop_token_ids": [99999], "min_tokens": 2}, "stop_token_ids[0]", "token_out_of_vocabulary"),
    ({"allowed_token_ids": [512]}, "allowed_token_ids[0]", "token_out_of_vocabulary"),
    ({"min_tokens": 20, "max_tokens": 5}, "min_tokens", "invalid_field"),
    ({"max_tokens": 0}, "max_tokens", "invalid_field"),
    ({"n": 2, "output_token_ids": [5], "seed": 1}, "n", "invalid_field"),
    ({"output_token_ids": [5]}, "seed", "invalid_field"),
    ({"stop": "x" * 2000}, "stop", "invalid_field"),
]


@pytest.mark.case("B35", "B50")
async def test_what_does_not_fit_is_refused_by_the_clients_name_and_good_ones_are_served(
    http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    scheduler.answer = [*ids_of("y"), EOS]
    for fields, param, code in REFUSED:
        response = await http.post("/v1/completions", json={"prompt": "x"} | fields)
        error = ErrorAnswer.model_validate_json(response.text).error
        assert (response.status_code, error.param, error.code) == (400, param, code)
        assert error.type == "invalid_request_error"
        assert error.message.startswith(param)
        good = await http.post("/v1/completions", json={"prompt": "x"})
        assert good.json()["choices"][0]["text"] == "y"


@pytest.mark.case("B52")
async def test_a_bos_is_added_once(
    tmp_path: pathlib.Path, make_gateway: Callable[..., Any], scheduler: ScriptedScheduler
) -> None:
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    directory = save_directory(tmp_path / "bos", with_bos(make_tokenizer("byte_level")), chat_template=template)
    gateway = await make_gateway(scheduler=scheduler.target, tokenizer=directory, http_port=0)
    await wait_until_ready(gateway)
    hi = make_tokenizer("byte_level").encode("hi").ids
    scheduler.answer = [EOS]
    async with httpx.AsyncClient(base_url=http_url(gateway), trust_env=False) as http:
        for path, body in (
            ("/v1/chat/completions", {"messages": HI}),
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/completions", {"prompt": "<s>hi"}),
        ):
            usage = (await http.post(path, json=body)).json()["usage"]
            assert list((await scheduler.next_add()).spec.prompt_token_ids) == [1, *hi]
            assert usage["prompt_tokens"] == 1 + len(hi)


@pytest.mark.case("B51")
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ raise_exception('half \\ud83d') }}", r"half \ud83d"),
        ("{{ 'half \\ud83d' }}", "half of a surrogate pair"),
        ("{{ raise_exception('y' * 1_000_000) }}", "chat.messages: " + "y" * 500 + "... (cut, of 1000000 characters)"),
        (None, "chat template"),
    ],
)
async def test_what_a_template_refuses_is_a_400_in_its_words(
    template: str | None,
    words: str,
    tmp_path: pathlib.Path,
    make_gateway: Callable[..., Any],
    scheduler: ScriptedScheduler,
) -> None:
    directory = save_directory(tmp_path / "t", make_tokenizer("byte_level"), chat_template=template)
    gateway = await make_gateway(scheduler=scheduler.target, tokenizer=directory, http_port=0)
    await wait_until_ready(gateway)
    async with httpx.AsyncClient(base_url=http_url(gateway), trust_env=False) as http:
        response = await http.post("/v1/chat/completions", json={"messages": HI})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "messages", "chat_template_failed")
    assert words.replace("chat.messages", "messages") in error["message"]
    assert scheduler.adds.empty()


@pytest.mark.case("B74")
async def test_a_url_in_a_message_is_refused_and_nobody_calls_it(http: httpx.AsyncClient) -> None:
    calls = 0

    async def on_call(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        writer.close()

    listener = await asyncio.start_server(on_call, "127.0.0.1", 0)
    local = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
    for url in ("http://169.254.169.254/latest", "file:///etc/passwd", local):
        part = {"type": "image_url", "image_url": {"url": url}}
        response = await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].content[0].type")
    listener.close()
    await listener.wait_closed()
    assert calls == 0
