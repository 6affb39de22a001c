"""The tokenizer of a model directory as one archive, as `GetTokenizer` sends it, and what else its files say."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import pathlib
import zipfile
from collections.abc import Iterator
from typing import Any

from smg_grpc_proto.generated import common_pb2

from gateway.tokenizer import TOKENIZER_FILE
from holdback.errors import InternalError

CHUNK_BYTES = 64 * 1024
FILE_NAMES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    "chat_template.jinja",
)
_DATE = (1980, 1, 1, 0, 0, 0)  # the same files give the same archive, at every gateway


class TokenizerFiles:
    """The files of one directory. They are read once; the archive is kept for the life of the process.

    Attributes:
        directory: where they are.
    """

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self._reading: asyncio.Task[tuple[bytes, str]] | None = None

    async def chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """A zip archive in pieces; the last one has the SHA-256 of the whole, in hexadecimal.

        Raises:
            InternalError: the folder is not what it was when the gateway started.
        """
        if self._reading is None or (self._reading.done() and self._reading.exception() is not None):
            self._reading = asyncio.create_task(asyncio.to_thread(_archive, self.directory))
        return _chunks(*await asyncio.shield(self._reading))

    async def model_config(self) -> dict[str, Any]:
        """What `config.json` says; empty where there is none."""
        return await asyncio.to_thread(_read_config, self.directory / "config.json")


def _read_config(path: pathlib.Path) -> dict[str, Any]:
    """It was read when the tokenizer was loaded, so it is an object, unless it was changed since."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _archive(directory: pathlib.Path) -> tuple[bytes, str]:
    """The archive and its SHA-256."""
    if not (directory / TOKENIZER_FILE).is_file():
        raise InternalError(f"the tokenizer's folder has no {TOKENIZER_FILE} any more")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in FILE_NAMES:
            path = directory / name
            if path.is_file():
                info = zipfile.ZipInfo(name, date_time=_DATE)
                info.external_attr = 0o644 << 16
                archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    content = buffer.getvalue()
    return content, hashlib.sha256(content).hexdigest()


def _chunks(content: bytes, sha256: str) -> Iterator[common_pb2.GetTokenizerChunk]:
    for start in range(0, len(content), CHUNK_BYTES):
        data = content[start : start + CHUNK_BYTES]
        is_last = start + CHUNK_BYTES >= len(content)
        yield common_pb2.GetTokenizerChunk(data=data, sha256=sha256 if is_last else "")
