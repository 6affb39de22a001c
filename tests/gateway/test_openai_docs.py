"""What docs/api.md says of the HTTP API: its examples run, its tables name every field and status."""

from __future__ import annotations

import asyncio
import pathlib
import re
import shlex
from typing import Any

import httpx
import pytest

from gateway.openai.chat import ChatCompletionRequest
from gateway.openai.completion import CompletionRequest
from gateway.openai.openapi import DESCRIPTIONS
from gateway.server import GatewayServer
from tests.gateway.conftest import http_url
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "api.md"
SECTION = DOCUMENT.read_text(encoding="utf-8").partition("## The OpenAI HTTP API")[2].partition("\n## ")[0]
USUAL_URL = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)


def answer(scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [*byte_ids(make_tokenizer("byte_level"), b"Paris"), 2]


@pytest.mark.loopback
async def test_the_python_example_runs(
    http_gateway: GatewayServer, scheduler: ScriptedScheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(scheduler)
    (example,) = blocks("python")
    program = compile(example.replace(USUAL_URL, http_url(http_gateway)), str(DOCUMENT), "exec")
    await asyncio.to_thread(exec, program, {})
    assert capsys.readouterr().out.count("Paris") == 2


@pytest.mark.loopback
async def test_the_curl_examples_are_requests_that_are_answered(
    http: httpx.AsyncClient, scheduler: ScriptedScheduler
) -> None:
    answer(scheduler)
    commands = [shlex.split(command) for command in blocks("sh")[0].replace("\\\n", "").splitlines()]
    assert len(commands) == 2
    for _, url, header_flag, header, data_flag, data in commands:
        assert (header_flag, data_flag) == ("-H", "-d")
        name, _, value = header.partition(": ")
        response = await http.post(url.removeprefix(USUAL_URL), content=data.encode(), headers={name: value})
        assert response.status_code == 200
        assert "Paris" in response.text or '"P"' in response.text


def test_every_field_of_both_endpoints_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", SECTION))
    for kind in (CompletionRequest, ChatCompletionRequest):
        assert set(kind.model_fields) | set(kind.unsupported) <= named


def test_every_field_that_the_table_names_exists() -> None:
    table = SECTION.partition("### Fields")[2].partition("\n\nNot supported")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(CompletionRequest.model_fields) | set(ChatCompletionRequest.model_fields)


def test_every_status_is_explained() -> None:
    table = SECTION.partition("### Errors")[2].partition("### Streams")[0]
    cells: Any = [line.split("|")[1] for line in table.splitlines() if re.match(r"\| \d", line)]
    assert {int(status) for cell in cells for status in cell.split(",")} == set(DESCRIPTIONS) | {405}
