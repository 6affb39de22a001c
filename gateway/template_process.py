"""The process that renders chat templates: `python -m gateway.template_process BYTES`, started by `template_workers`.

BYTES is its limit of memory. Messages are frames on standard input and output: the lengths of what follows, in four
bytes each, big-endian; JSON; and text in UTF-8. Each frame in is answered by one out.
`{"source": ..., "special_tokens": {...}}` makes a template known, by its number from 0 on, and gets `{}` once it is
compiled. `{"template": number, "messages": [...]}` gets `{}` and the prompt as text; of each field of a message it has
the number of characters, which follow one another in the text: JSON, which the loop of the gateway would make, may be
six times as long. What fails gets `{"error": ...}`. The process ends with its input, or with the gateway.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from gateway.chat import ChatTemplate, template_failed
from holdback.errors import ConfigError, InvalidArgumentError
from holdback.parent import end_with_parent

HEADER = struct.Struct(">II")


def pack(message: Any, text: str = "") -> bytes:
    """A frame."""
    body, encoded = json.dumps(message).encode(), text.encode()
    return b"".join((HEADER.pack(len(body), len(encoded)), body, encoded))


def pack_question(number: int, messages: Sequence[Mapping[str, str]]) -> bytes:
    """The frame that asks a template for a prompt."""
    sizes = [{name: len(value) for name, value in message.items()} for message in messages]
    text = "".join(value for message in messages for value in message.values())
    return pack({"template": number, "messages": sizes}, text)


def _messages(sizes: list[dict[str, int]], text: str) -> list[dict[str, str]]:
    """What went into `pack_question`."""
    messages, position = [], 0
    for fields in sizes:
        message = {}
        for name, size in fields.items():
            message[name] = text[position : position + size]
            position += size
        messages.append(message)
    return messages


def main() -> None:
    end_with_parent(signal.SIGKILL)
    memory_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    templates: list[ChatTemplate] = []
    while (frame := _read(stdin)) is not None:
        request, text = frame
        if "source" in request:
            _write(stdout, pack(_add(templates, request)))
        else:
            _write(stdout, _answer(templates[request["template"]], request["messages"], text))


def _add(templates: list[ChatTemplate], request: dict[str, Any]) -> dict[str, str]:
    try:
        templates.append(ChatTemplate(request["source"], request["special_tokens"]))
    except ConfigError as error:
        return {"error": error.message}
    return {}


def _answer(template: ChatTemplate, sizes: list[dict[str, int]], text: str) -> bytes:
    try:
        return pack({}, template.render(_messages(sizes, text)))
    except InvalidArgumentError as error:
        return pack({"error": error.message})
    except MemoryError:
        return pack({"error": template_failed("it needs more memory than it may have").message})


def _read(stream: BinaryIO) -> tuple[Any, str] | None:
    """The next message and its text; None at the end of the input."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    size, text_size = HEADER.unpack(header)
    return json.loads(stream.read(size)), stream.read(text_size).decode()


def _write(stream: BinaryIO, frame: bytes) -> None:
    stream.write(frame)
    stream.flush()


if __name__ == "__main__":
    main()
