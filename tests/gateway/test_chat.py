"""Templates render as transformers renders them, run in a sandbox, and fail as the client's error."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway import chat
from gateway.chat import ChatTemplate
from holdback.errors import ConfigError, ErrorReason, InvalidArgumentError
from tests.gateway.small_tokenizers import CHAT_TEMPLATE

USER = [{"role": "user", "content": "hi"}]
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str | None, messages: Sequence[Mapping[str, Any]] = USER) -> str:
    return ChatTemplate(source, SPECIAL_TOKENS).render(messages)


def refusal(source: str | None, messages: Sequence[Mapping[str, Any]] = USER) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as caught:
        render(source, messages)
    return caught.value


@pytest.mark.parametrize(
    "source",
    [
        CHAT_TEMPLATE,
        "{% for m in messages %}\n    {% if loop.first %}\n{{ m | tojson }}\n    {% endif %}\n{% endfor %}\nend",
        "{{ messages | tojson(indent=2) }}{{ '<>&é' | tojson }}{{ undefined_thing }}",
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}{{ eos_token }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% if tools is not none %}tools{% endif %}{{ add_generation_prompt }}{{ dict(a=1)['a'] }}",
        "{{ messages[0].content | trim }}|{{ messages[-1]['content'][::-1] }}|{{ messages[1:] | length }}",
    ],
)
def test_a_template_renders_as_transformers_renders_it(source: str) -> None:
    messages = [{"role": "user", "content": " hé <b> "}, {"role": "assistant", "content": "yes"}]
    rendered: Any = render_jinja_template(
        [messages],
        chat_template=source,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert render(source, messages) == rendered[0][0]


def test_a_template_may_tell_the_date() -> None:
    today = datetime.datetime.now().strftime("%Y")
    assert render("{{ strftime_now('%Y') }}") == today


@pytest.mark.case("B51")
def test_what_a_template_raises_is_the_clients_error_with_its_message() -> None:
    error = refusal("{{ raise_exception('roles must alternate') }}")
    assert error.reason is ErrorReason.CHAT_TEMPLATE_FAILED
    assert error.field == "chat.messages"
    assert error.message == "the chat template refused chat.messages: roles must alternate"


@pytest.mark.case("B51")
@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages[7].content.nothing }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages.missing() }}",
    ],
)
def test_a_template_that_fails_is_the_clients_error(source: str) -> None:
    assert refusal(source).reason is ErrorReason.CHAT_TEMPLATE_FAILED


@pytest.mark.case("B51")
def test_a_model_without_template_says_what_to_send_instead() -> None:
    error = refusal(None)
    assert error.message == "chat is set, but the model has no chat template; allowed: text or token_ids"
    assert error.reason is ErrorReason.CHAT_TEMPLATE_FAILED


@pytest.mark.case("B50")
def test_no_messages_are_refused_and_an_empty_content_is_not() -> None:
    assert refusal(CHAT_TEMPLATE, []).field == "chat.messages"
    rendered = render(CHAT_TEMPLATE, [{"role": "user", "content": ""}])
    assert rendered == "<s><|user|>user: <|end|>assistant:"


@pytest.mark.case("B72")
@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ (raise_exception | attr('__globals__'))['os'].name }}",
        "{{ lipsum(n=100000) }}",
    ],
)
def test_a_template_reaches_nothing_outside_its_sandbox(source: str) -> None:
    assert refusal(source).reason is ErrorReason.CHAT_TEMPLATE_FAILED


@pytest.mark.case("B72")
def test_what_a_template_writes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_BYTES", 1000)
    source = "{% for i in range(10000) %}{% for j in range(10000) %}0123456789{% endfor %}{% endfor %}"
    assert "writes more than 1000 bytes" in refusal(source).message


def test_it_is_bytes_that_are_bounded_in_many_pieces_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_RENDERED_BYTES", 1000)
    emoji = [{"role": "user", "content": "\U0001f600" * 250}]
    assert render("{{ messages[0].content }}", emoji) == emoji[0]["content"]
    assert render("{% for c in messages[0].content %}{{ c }}{% endfor %}", emoji) == emoji[0]["content"]
    for source in ("{{ messages[0].content }}\u00e9", "{% for c in messages[0].content + 'a' %}{{ c }}{% endfor %}"):
        assert "writes more than 1000 bytes" in refusal(source, emoji).message


def test_a_source_that_is_no_template_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate("{% for %}", {})
