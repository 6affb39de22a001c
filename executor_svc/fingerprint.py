"""The fingerprint of a model: what two executors must share to serve one pool.

It covers the configuration, every weight and the dtype that they run in. The dtype belongs to it because a request may
move between the executors of a pool: in another dtype it would go on with other tokens. How weights are cut into files
does not belong to it, nor do file names, the configuration's notes on who wrote it, or a tokenizer.

Reading every byte keeps up with a disk, and loading reads them too; beyond `FULL_BYTES` that would hold up a start for
minutes, so each larger tensor then counts with evenly spread samples. Other training changes nearly every number of a
tensor, so samples tell; an edit of a few numbers of a very large model, made by hand, they may miss.
"""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

FULL_BYTES = 4 << 30
SAMPLES_PER_TENSOR = 64
SAMPLE_BYTES = 16 << 10

# Who wrote the file, and how weights are stored or cached, say nothing of what the model computes.
_NOT_THE_MODEL = frozenset({"transformers_version", "dtype", "torch_dtype", "use_cache"})


def fingerprint(
    config: dict[str, Any], weight_files: Sequence[pathlib.Path], dtype: str, *, full_bytes: int = FULL_BYTES
) -> str:
    """32 hexadecimal digits, a dash and the dtype.

    Args:
        config: content of config.json.
        weight_files: whole safetensors files; their order and number do not matter.
        dtype: that the weights run in.
        full_bytes: most weight bytes that are read completely.
    """
    relevant = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL and not key.startswith("_")}
    described = json.dumps(relevant, sort_keys=True, separators=(",", ":"))
    files = tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files)
    is_sampled = sum(size for _, size, _ in files) > full_bytes
    return f"{_digest(described, files, is_sampled=is_sampled)[:32]}-{dtype}"


@functools.lru_cache(maxsize=4)  # a start asks more than once; a changed file has another time
def _digest(described: str, files: tuple[tuple[pathlib.Path, int, int], ...], *, is_sampled: bool) -> str:
    digest = hashlib.sha256()
    digest.update(described.encode())
    digest.update(b"sampled" if is_sampled else b"full")
    tensors = [tensor for path, _, _ in files for tensor in _tensors(path)]
    for name, description, path, start, size in sorted(tensors):
        digest.update(f"\n{name}\n{description}\n".encode())
        for chunk in _chunks(path, start, size, is_sampled=is_sampled):
            digest.update(chunk)
    return digest.hexdigest()


def _tensors(path: pathlib.Path) -> Iterator[tuple[str, str, pathlib.Path, int, int]]:
    """Name, dtype with shape, file, first byte and number of bytes of each tensor.

    A safetensors file is the length of its header (8 bytes, little endian), the header in JSON, then the data.
    """
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, f"{entry['dtype']} {entry['shape']}", path, 8 + header_bytes + start, end - start


def _chunks(path: pathlib.Path, start: int, size: int, *, is_sampled: bool) -> Iterator[bytes]:
    with path.open("rb") as file:
        if not is_sampled or size <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
            file.seek(start)
            while size > 0:
                chunk = file.read(min(size, 1 << 20))
                size -= len(chunk) or size
                yield chunk
            return
        for sample in range(SAMPLES_PER_TENSOR):
            file.seek(start + (size - SAMPLE_BYTES) * sample // (SAMPLES_PER_TENSOR - 1))
            yield file.read(SAMPLE_BYTES)
