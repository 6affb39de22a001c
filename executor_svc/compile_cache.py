"""What was compiled before, addressed by everything that it was compiled from.

A backend keeps its artifacts in a cache of its own, but does not say beforehand whether a graph is in it, and a
compilation takes minutes. So beside the artifacts there is one small record for each graph that was built:

    DIRECTORY/DIGEST OF THE IDENTITY/identity.json     what the digest is of, for people
                                     artifacts/        the backend's own cache, and nobody else's
                                     graphs/NAME-DIGEST.json

The identity is what all graphs of a device share: model, dtype, versions, flags, processor. The digest of a graph
covers the identity and its shapes. A hit means: this graph was built before from exactly these inputs, and what was
written for it still lies here. Several executors may use one directory at once: a record is written at once or not at
all, and after its artifacts. Anything may be deleted at any time; it is built again.

Records are JSON and are not trusted: one that cannot be right is a miss. Artifacts are code and are run, so the
directory must be nobody else's (`cache_directory`).
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

import structlog

from executor_svc.cache_directory import CacheDirectoryError, prepare_directory, user_directory, write_atomically
from holdback.errors import ConfigError
from holdback.types import CompileCounts, ExecutorLimits, Phase

if TYPE_CHECKING:
    from executor_svc.devices.base import GraphKey

log = structlog.get_logger(__name__)

DEFAULT_NAME = "graphs"
PACKAGES = ("holdback", "torch", "transformers", "torch-neuronx", "neuronx-cc")
SOURCES = pathlib.Path(__file__).parent

_MAX_RECORD_BYTES = 4 << 20
_PASSING = (".tmp", ".lock")  # in names of files that a backend removes again

Identity = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One graph in a cache.

    Attributes:
        name: for people: `decode of 8 rows, context 1024`.
        is_hit: it was built before.
        folder: where the backend keeps its artifacts, those of this graph among them.
    """

    name: str
    is_hit: bool
    folder: pathlib.Path


def describe_identity(
    *,
    backend: str,
    fingerprint: str,
    dtype: str,
    max_model_len: int,
    target: str,
    flags: Sequence[str] = (),
    **settings: Any,
) -> dict[str, Any]:
    """The identity of a device's graphs.

    Args:
        backend: that compiles.
        fingerprint: of the model; it covers its structure.
        dtype: of weights and KV memory.
        max_model_len: on which the width of block tables depends.
        target: processor with the features that matter, or kind of device.
        flags: of the compiler.
        settings: whatever else changes the code, as JSON values.
    """
    return {
        "backend": backend,
        "fingerprint": fingerprint,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "target": target,
        "flags": list(flags),
        "settings": settings,
        "versions": {name: _version(name) for name in PACKAGES},
        "sources": _digest_of_sources(),
    }


class CompileCache:
    """The graphs of one device.

    Args:
        directory: shared by any number of executors; None is `holdback/graphs` in the user's cache directory.
        identity: as `describe_identity` gives it.
        is_required: every graph must be there: nothing is written, and a miss is an error.

    Attributes:
        folder: of the artifacts; for the backend's own setting.
        counts: of the graphs asked for.

    Raises:
        ConfigError: the directory cannot be used, or others can write to it.
    """

    def __init__(self, directory: pathlib.Path | None, identity: Identity, *, is_required: bool = False) -> None:
        self._directory = user_directory(DEFAULT_NAME) if directory is None else directory.resolve()
        self._identity = _canonical(identity)
        self._is_required = is_required
        self._home = self._directory / _digest(self._identity)
        self._graphs = self._home / "graphs"
        self.folder = self._home / "artifacts"
        self.counts = CompileCounts()
        self._before: dict[str, dict[str, int]] = {}
        self._prepare()

    def graph(self, key: GraphKey, limits: ExecutorLimits) -> CacheEntry:
        """Looks a graph up, and counts a hit or a miss. To be asked right before the graph is built.

        Raises:
            ConfigError: it is not there, and every graph is required.
        """
        path = self._record_path(key, limits)
        entry = CacheEntry(describe_graph(key), self._is_whole(path), self.folder)
        if entry.is_hit:
            self.counts.num_hits += 1
            return entry
        self.counts.num_misses += 1
        if self._is_required:
            raise ConfigError(
                f"the graph {entry.name} is not in the compile cache {str(self._directory)!r}, as require_cached asks; "
                "fill it with --compile-only and the same settings"
            )
        self._before[path.name] = self._list_artifacts()
        return entry

    def record(self, key: GraphKey, limits: ExecutorLimits, seconds: float) -> None:
        """Notes that a graph was built; a cache that cannot be written to any more is one log line.

        Args:
            key: the graph, looked up before.
            limits: as then.
            seconds: that it took.
        """
        self.counts.build_s += seconds
        path = self._record_path(key, limits)
        before = self._before.pop(path.name, None)
        if before is None:  # it was a hit
            return
        made = {name: size for name, size in self._list_artifacts().items() if before.get(name) != size}
        content = {"graph": describe_graph(key), "seconds": round(seconds, 3), "unix_s": int(time.time())}
        try:
            write_atomically(path, json.dumps(content | {"artifacts": made}, indent=1).encode())
        except OSError as error:
            log.warning("compile_cache_not_written", graph=describe_graph(key), reason=str(error))

    def _prepare(self) -> None:
        check_directory(self._directory, is_read_only=self._is_required)
        if self._is_required:
            if self._home.is_dir():
                check_directory(self._home, is_read_only=True)
            return
        for directory in (self._home, self._graphs, self.folder):
            check_directory(directory)
        write_atomically(self._home / "identity.json", self._identity)

    def _record_path(self, key: GraphKey, limits: ExecutorLimits) -> pathlib.Path:
        shapes = {
            "graph": [key.phase.value, key.size, key.context],
            "block_size": limits.block_size,
            "num_blocks": limits.num_blocks,
            "max_num_seqs": limits.max_num_seqs,
        }
        digest = _digest(self._identity + _canonical(shapes))
        return self._graphs / f"{key.phase.value}-{key.size}-{key.context}-{digest}.json"

    def _is_whole(self, path: pathlib.Path) -> bool:
        """There is a record, and no artifact that it names is gone or shorter.

        One may be longer: when the record was made, another process may have been in the middle of writing it.
        """
        try:
            if path.stat().st_size > _MAX_RECORD_BYTES:
                return False
            artifacts = json.loads(path.read_bytes())["artifacts"]
            return all((self.folder / name).stat().st_size >= size for name, size in artifacts.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False

    def _list_artifacts(self) -> dict[str, int]:
        found = {}
        for path in self.folder.rglob("*"):
            if path.is_file() and not any(part in path.name for part in _PASSING):
                found[path.relative_to(self.folder).as_posix()] = path.stat().st_size
        return found


def check_directory(directory: pathlib.Path, *, is_read_only: bool = False) -> None:
    """As `prepare_directory`, of the setting `compile_cache`. Raises ConfigError."""
    try:
        prepare_directory(directory, is_read_only=is_read_only)
    except CacheDirectoryError as error:
        raise ConfigError(f"compile_cache is {str(directory)!r}, which {error}") from None


def describe_graph(key: GraphKey) -> str:
    """For people."""
    unit = "tokens" if key.phase is Phase.PREFILL else "rows"
    return f"{key.phase.value} of {key.size} {unit}, context {key.context}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _digest_of_sources() -> str:
    """Of this package: what a graph computes is written in it, and a version number does not follow every change."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(f"{path.relative_to(SOURCES).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, indent=1).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]
