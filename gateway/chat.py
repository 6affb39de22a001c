"""Conversations to prompt text with the model's own chat template.

Templates come from model directories only, never from a request. They run in Jinja's immutable sandbox with the
conventions of the transformers library: `raise_exception`, `strftime_now`, a `tojson` that escapes no HTML, loop
controls, `{% generation %}` blocks, and the special tokens by name. What a template may write is bounded here; how long
it may run, and with how much memory, is bounded by the process that it runs in, see `template_workers`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from holdback.errors import ConfigError, ErrorReason, InvalidArgumentError
from holdback.request_limits import num_bytes

MAX_RENDERED_BYTES = 8 * 1024 * 1024
"""Of UTF-8, as long as a text may be. More than any model takes; a template that writes more is stopped."""

MAX_REASON_CHARS = 500
"""Of why a template refuses messages, which it may quote; an error goes in headers, too."""


class ChatTemplate:
    """One model's chat template."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        """Compiles the template, which works out what is constant in it and so takes whatever time that takes.

        Args:
            source: Jinja; None for a model that has no template, which refuses every conversation.
            special_tokens: variables such as `bos_token`.

        Raises:
            ConfigError: the source is no template.
        """
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None
        if source is not None:
            try:
                self._template = _environment().from_string(source)
            except (jinja2.TemplateError, MemoryError, RecursionError) as error:
                raise ConfigError(f"the chat template cannot be read: {str(error) or type(error).__name__}") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for a conversation, special tokens written out, ready for the assistant to speak.

        Raises:
            InvalidArgumentError: there is no message, there is no template, or the template refused the messages;
                then the error has the template's own message and the reason CHAT_TEMPLATE_FAILED.
        """
        check_messages(messages, has_template=self._template is not None)
        assert self._template is not None  # noqa: S101 - checked
        variables = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return _join_bounded(self._template.generate(**(self._special_tokens | variables)))
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise template_failed(str(error) or type(error).__name__) from error
        except RecursionError:
            raise template_failed("the template calls itself too deeply") from None


def check_messages(messages: Sequence[Mapping[str, Any]], *, has_template: bool) -> None:
    """Raises InvalidArgumentError for what no template need be asked about."""
    if not messages:
        raise InvalidArgumentError(
            "chat.messages has 0 messages; allowed: at least one",
            field="chat.messages",
            value="0 messages",
            limit="at least one",
        )
    if not has_template:
        raise InvalidArgumentError(
            "chat is set, but the model has no chat template; allowed: text or token_ids",
            field="chat",
            value="messages",
            limit="text or token_ids, for this model",
            reason=ErrorReason.CHAT_TEMPLATE_FAILED,
        )


def _join_bounded(pieces: Any) -> str:
    taken, total = [], 0
    for piece in pieces:
        # The characters first: to encode a piece of very many takes as much again.
        total += len(piece) if total + len(piece) > MAX_RENDERED_BYTES else _num_bytes(piece)
        if total > MAX_RENDERED_BYTES:
            raise template_failed(f"the template writes more than {MAX_RENDERED_BYTES} bytes")
        taken.append(piece)
    return "".join(taken)


def _num_bytes(piece: str) -> int:
    try:
        return num_bytes(piece)
    except UnicodeEncodeError:
        raise template_failed("the template writes half of a surrogate pair, which is no character") from None


def template_failed(why: str) -> InvalidArgumentError:
    """The error of a client whose messages a template did not take, with the reason why not, cut where it is long."""
    if len(why) > MAX_REASON_CHARS:
        why = f"{why[:MAX_REASON_CHARS]}... (cut, of {len(why)} characters)"
    return template_error(f"the chat template refused chat.messages: {why}")


def template_error(message: str) -> InvalidArgumentError:
    """The same from the whole message."""
    return InvalidArgumentError(
        message,
        field="chat.messages",
        value="messages",
        limit="what the model's chat template accepts",
        reason=ErrorReason.CHAT_TEMPLATE_FAILED,
    )


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks for training what the assistant said; here it is its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.globals.pop("lipsum")  # writes as much as it is asked for in one piece
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)  # local time, as templates expect it


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
