"""The process that renders chat templates: `python -m gateway.template_process BYTES`, started by `template_workers`.

BYTES is its limit of memory. Messages are frames on standard input and output: four bytes of length, big-endian, then
UTF-8 JSON. Each frame in is answered by one out. `{"source": ..., "special_tokens": {...}}` makes a template known, by
its number from 0 on, and gets `{}` once it is compiled; `{"template": number, "messages": [...]}` gets `{"text": ...}`;
what fails gets `{"error": ...}`. The process ends with its input, or with the gateway.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

from gateway.chat import ChatTemplate, template_failed
from holdback.errors import ConfigError, InvalidArgumentError
from holdback.parent import end_with_parent

HEADER = struct.Struct(">I")


def pack(message: Any) -> bytes:
    """A frame."""
    body = json.dumps(message).encode()
    return HEADER.pack(len(body)) + body


def main() -> None:
    end_with_parent(signal.SIGKILL)
    memory_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    templates: list[ChatTemplate] = []
    while (request := _read(stdin)) is not None:
        if "source" in request:
            _write(stdout, _add(templates, request))
        else:
            _write(stdout, _answer(templates[request["template"]], request["messages"]))


def _add(templates: list[ChatTemplate], request: dict[str, Any]) -> dict[str, str]:
    try:
        templates.append(ChatTemplate(request["source"], request["special_tokens"]))
    except ConfigError as error:
        return {"error": error.message}
    return {}


def _answer(template: ChatTemplate, messages: list[dict[str, Any]]) -> dict[str, str]:
    try:
        return {"text": template.render(messages)}
    except InvalidArgumentError as error:
        return {"error": error.message}
    except MemoryError:
        return {"error": template_failed("it needs more memory than it may have").message}


def _read(stream: BinaryIO) -> Any:
    """The next message; None at the end of the input."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return json.loads(stream.read(HEADER.unpack(header)[0]))


def _write(stream: BinaryIO, message: Any) -> None:
    stream.write(pack(message))
    stream.flush()


if __name__ == "__main__":
    main()
