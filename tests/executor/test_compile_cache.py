"""The compile cache: what is a hit, what is not, and what a directory must be."""

from __future__ import annotations

import json
import os
import pathlib
import stat
import subprocess
import sys
from typing import Any

import pytest
import structlog.testing

from executor_svc.cache_directory import CacheDirectoryError, prepare_directory, write_atomically
from executor_svc.compile_cache import CompileCache, describe_identity
from executor_svc.devices.base import GraphKey, StepInputs
from executor_svc.devices.simulated import SimulatedDevice
from executor_svc.graphs import warm_up
from holdback.errors import ConfigError
from holdback.types import CompileCounts, ExecutorLimits, Phase
from tests.executor.builders import build_device

KEY = GraphKey(Phase.DECODE, 8, 256)
LIMITS = ExecutorLimits(16, 65, 8, 128, (128,), (8,), (256,))
needs_other_users = pytest.mark.skipif(os.getuid() == 0, reason="root may write to every directory")


def identity(**changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"backend": "test", "fingerprint": "f", "dtype": "bfloat16", "max_model_len": 256}
    return describe_identity(**(settings | {"target": "trn2", "flags": ["-O1"]} | changes))


def fixed_identity(**changes: Any) -> dict[str, Any]:
    """Of sources that nobody edits while a test runs."""
    return identity(**changes) | {"sources": "s"}


def open_cache(directory: pathlib.Path, **changes: Any) -> CompileCache:
    return CompileCache(directory, fixed_identity(**changes))


def compile_graph(
    cache: CompileCache, key: GraphKey = KEY, limits: ExecutorLimits = LIMITS, name: str = "neff"
) -> bool:
    """Builds a graph as a device does, one artifact of 9 bytes. Whether it was a hit."""
    entry = cache.graph(key, limits)
    if not entry.is_hit:
        (entry.folder / name).write_bytes(b"artifacts")
    cache.record(key, limits, 1.5)
    return entry.is_hit


# Hits and misses


def test_what_was_built_once_is_found_by_the_next_process(tmp_path: pathlib.Path) -> None:
    first, second = open_cache(tmp_path), open_cache(tmp_path)
    assert not compile_graph(first)
    assert compile_graph(second)
    assert first.folder == second.folder
    assert (first.counts, second.counts) == (CompileCounts(0, 1, 1.5), CompileCounts(1, 0, 1.5))


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "other"},
        {"fingerprint": "g"},
        {"dtype": "float32"},
        {"max_model_len": 512},
        {"target": "trn3"},
        {"flags": ["-O2"]},
        {"flags": []},
        {"tensor_parallel_size": 2},
    ],
)
def test_another_identity_is_a_miss_with_a_folder_of_its_own(changes: dict[str, Any], tmp_path: pathlib.Path) -> None:
    compile_graph(open_cache(tmp_path))
    other = open_cache(tmp_path, **changes)
    assert other.folder != open_cache(tmp_path).folder
    assert not compile_graph(other)


def test_another_version_or_another_source_is_another_identity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    before = identity()
    assert before["versions"]["torch"] is not None
    assert before["versions"]["neuronx-cc"] is None
    monkeypatch.setattr("executor_svc.compile_cache.metadata.version", lambda _name: "99")
    assert identity()["versions"] != before["versions"]
    monkeypatch.setattr("executor_svc.compile_cache.SOURCES", tmp_path)
    (tmp_path / "step.py").write_text("1")
    first = identity()["sources"]
    (tmp_path / "step.py").write_text("2")
    assert len({first, identity()["sources"], before["sources"]}) == 3


@pytest.mark.parametrize(
    "key",
    [GraphKey(Phase.PREFILL, 8, 256), GraphKey(Phase.DECODE, 4, 256), GraphKey(Phase.DECODE, 8, 128)],
)
def test_another_graph_is_a_miss(key: GraphKey, tmp_path: pathlib.Path) -> None:
    compile_graph(open_cache(tmp_path))
    assert not compile_graph(open_cache(tmp_path), key)


def test_only_limits_that_shape_a_graph_make_a_miss(tmp_path: pathlib.Path) -> None:
    compile_graph(open_cache(tmp_path))
    more_buckets = ExecutorLimits(16, 65, 8, 256, (128, 256), (4, 8), (128, 256), 1)
    assert compile_graph(open_cache(tmp_path), limits=more_buckets)
    for changed in (
        ExecutorLimits(32, 65, 8, 128, (128,), (8,), (256,)),
        ExecutorLimits(16, 66, 8, 128, (128,), (8,), (256,)),
        ExecutorLimits(16, 65, 9, 128, (128,), (9,), (256,)),
    ):
        assert not compile_graph(open_cache(tmp_path), limits=changed)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"art")])
def test_a_graph_whose_artifacts_are_gone_or_cut_off_is_a_miss(damage: Any, tmp_path: pathlib.Path) -> None:
    cache = open_cache(tmp_path)
    compile_graph(cache)
    compile_graph(cache, GraphKey(Phase.DECODE, 4, 256), name="another")
    damage(cache.folder / "neff")
    assert not compile_graph(open_cache(tmp_path))
    assert compile_graph(open_cache(tmp_path), GraphKey(Phase.DECODE, 4, 256))
    assert compile_graph(open_cache(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b"{}", b'{"artifacts": 3}', b'{"artifacts": {"../../x": 1}}', b"[" * 100_000]
)
def test_a_record_that_cannot_be_right_is_a_miss(content: bytes, tmp_path: pathlib.Path) -> None:
    cache = open_cache(tmp_path)
    compile_graph(cache)
    (record,) = cache.folder.parent.glob("graphs/*.json")
    record.write_bytes(content)
    assert not compile_graph(open_cache(tmp_path))
    assert compile_graph(open_cache(tmp_path))


def test_files_that_a_backend_removes_again_are_no_artifacts(tmp_path: pathlib.Path) -> None:
    cache = open_cache(tmp_path)
    entry = cache.graph(KEY, LIMITS)
    for name in ("neff", "neff.lock", "x.tmp.17"):
        (entry.folder / name).write_bytes(b"")
    cache.record(KEY, LIMITS, 1.0)
    for name in ("neff.lock", "x.tmp.17"):
        (entry.folder / name).unlink()
    assert open_cache(tmp_path).graph(KEY, LIMITS).is_hit


def test_a_record_says_what_it_is_of(tmp_path: pathlib.Path) -> None:
    cache = open_cache(tmp_path)
    compile_graph(cache)
    (record,) = cache.folder.parent.glob("graphs/decode-8-256-*.json")
    content = json.loads(record.read_bytes())
    assert (content["graph"], content["seconds"]) == ("decode of 8 rows, context 256", 1.5)
    assert content["artifacts"] == {"neff": 9}
    assert json.loads((cache.folder.parent / "identity.json").read_bytes()) == fixed_identity()


def test_a_cache_that_fills_up_is_a_log_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache(tmp_path)

    def full(_path: pathlib.Path, _content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("executor_svc.compile_cache.write_atomically", full)
    with structlog.testing.capture_logs() as lines:
        assert not compile_graph(cache)
    assert [line["event"] for line in lines] == ["compile_cache_not_written"]


# Several processes

FILL = """
import pathlib, sys
from tests.executor.test_compile_cache import GraphKey, Phase, compile_graph, open_cache
cache = open_cache(pathlib.Path(sys.argv[1]))
print(sum(compile_graph(cache, GraphKey(Phase.DECODE, size, 256), name=str(size)) for size in range(1, 200)))
"""


def test_processes_that_fill_one_directory_at_once_leave_it_whole(tmp_path: pathlib.Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", FILL, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert all(0 <= int(process.communicate(timeout=60)[0]) < 200 for process in processes)
    cache = open_cache(tmp_path)
    assert all(compile_graph(cache, GraphKey(Phase.DECODE, size, 256)) for size in range(1, 200))
    assert not list(tmp_path.rglob("*.tmp"))


# The directory


def test_a_directory_is_made_for_this_user_alone(tmp_path: pathlib.Path) -> None:
    prepare_directory(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_a_directory_that_others_can_write_to_is_refused(mode: int, tmp_path: pathlib.Path) -> None:
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(ConfigError, match=r"compile_cache is '.*open', which can be written to by others"):
        open_cache(directory)


def test_a_folder_in_it_that_others_can_write_to_is_refused(tmp_path: pathlib.Path) -> None:
    open_cache(tmp_path).folder.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written to by others"):
        open_cache(tmp_path)


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"compile_cache is '.*file', which is a file; allowed: a directory"):
        open_cache(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"compile_cache is '.*below', which cannot be used: Not a directory"):
        open_cache(tmp_path / "file" / "below")


def test_a_directory_that_cannot_be_written_to_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("executor_svc.cache_directory.tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match="which cannot be written to: Read-only file system"):
        open_cache(tmp_path)


@needs_other_users
def test_a_directory_without_permission_to_write_is_refused(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CacheDirectoryError, match="cannot be written to: Permission denied"):
        prepare_directory(tmp_path)


def test_without_a_directory_it_is_the_users_own(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = CompileCache(None, identity())
    assert cache.folder.is_relative_to(tmp_path / "holdback" / "graphs")


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "taken", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


# Required


def test_a_required_graph_that_is_missing_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    compile_graph(open_cache(tmp_path))
    required = CompileCache(tmp_path, fixed_identity(), is_required=True)
    assert compile_graph(required)
    with pytest.raises(ConfigError, match=r"the graph decode of 4 rows, context 256 is not in the compile cache '"):
        required.graph(GraphKey(Phase.DECODE, 4, 256), LIMITS)
    assert required.counts == CompileCounts(1, 1, 1.5)


def test_a_required_cache_is_not_written_to(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"which cannot be used: No such file or directory"):
        CompileCache(tmp_path / "none", fixed_identity(), is_required=True)
    required = CompileCache(tmp_path, fixed_identity(), is_required=True)
    with pytest.raises(ConfigError, match="is not in the compile cache"):
        required.graph(KEY, LIMITS)
    assert list(tmp_path.iterdir()) == []


# Warm-up


class CompilingDevice(SimulatedDevice):
    """Keeps one artifact for each graph, as a backend does."""

    def __init__(self, cache: CompileCache) -> None:
        device = build_device(seqs_buckets=(1, 2))
        super().__init__(device.model, device.limits)
        self.compile_cache = cache
        self.compiled = cache.counts
        self.num_compiled = 0

    def launch(self, inputs: StepInputs) -> object:
        assert self.compile_cache is not None
        artifact = self.compile_cache.folder / f"{inputs.key.phase.value}-{inputs.key.size}"
        if not artifact.exists():
            artifact.write_bytes(b"code")
            self.num_compiled += 1
        return super().launch(inputs)


def warmed_up(cache: CompileCache) -> tuple[CompilingDevice, list[Any]]:
    device = CompilingDevice(cache)
    with structlog.testing.capture_logs() as lines:
        warm_up(device)
    return device, [*lines]


def test_warm_up_asks_for_each_graph_and_records_what_it_built(tmp_path: pathlib.Path) -> None:
    first, lines = warmed_up(open_cache(tmp_path))
    assert [line["is_hit"] for line in lines[:-1]] == [False] * 4
    assert (lines[-1]["num_graphs"], lines[-1]["num_hits"], lines[-1]["num_misses"]) == (4, 0, 4)
    second, lines = warmed_up(open_cache(tmp_path))
    assert [line["is_hit"] for line in lines[:-1]] == [True] * 4
    assert (lines[-1]["num_hits"], lines[-1]["num_misses"]) == (4, 0)
    assert (first.num_compiled, second.num_compiled) == (4, 0)


def test_a_warm_up_that_requires_every_graph_ends_at_the_first_that_is_missing(tmp_path: pathlib.Path) -> None:
    device, _ = warmed_up(open_cache(tmp_path))
    assert device.compile_cache is not None
    next(device.compile_cache.folder.parent.glob("graphs/decode-2-*")).unlink()
    required = CompilingDevice(CompileCache(tmp_path, fixed_identity(), is_required=True))
    with pytest.raises(ConfigError, match="the graph decode of 2 rows, context 32 is not in the compile cache"):
        warm_up(required)
    assert required.num_compiled == 0


def test_graphs_can_be_built_without_being_timed(tmp_path: pathlib.Path) -> None:
    device = CompilingDevice(open_cache(tmp_path))
    assert warm_up(device, is_timed=False) == ()
    assert device.compiled == CompileCounts(0, 4, device.compile_cache.counts.build_s)  # type: ignore[union-attr]
