"""The process that renders chat templates: `python -m gateway.template_process`, started by `template_workers`.

Messages are frames on standard input and output: four bytes of length, big-endian, then UTF-8 JSON. The first one in
has the templates and the limit of memory; the answer to it, `{}`, says that the process is ready. Then each frame in is
`{"template": number, "messages": [...]}` and each frame out `{"text": ...}` or `{"error": ...}`. The process ends with
its input, or with the gateway.
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
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    hello = _read(stdin)
    if hello is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (hello["memory_bytes"], hello["memory_bytes"]))
    try:
        templates = [ChatTemplate(entry["source"], entry["special_tokens"]) for entry in hello["templates"]]
    except ConfigError as error:
        _write(stdout, {"error": error.message})
        return
    _write(stdout, {})
    while (request := _read(stdin)) is not None:
        _write(stdout, _answer(templates[request["template"]], request["messages"]))


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
