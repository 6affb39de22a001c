"""Where compiled kernels are kept and when they are compiled, with a compiler that only writes a file."""

from __future__ import annotations

import importlib
import pathlib

import pytest

from executor_svc import kernels
from executor_svc.kernels import load_kernels
from executor_svc.kernels.build import BuildError, build
from holdback.errors import ConfigError

BUILD = importlib.import_module("executor_svc.kernels.build")
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
while [ "$1" != -o ]; do shift; done
echo "{version}" > "$2"
"""


@pytest.fixture
def compiler(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    return use_compiler(tmp_path / "c++", "1.0", monkeypatch)


def use_compiler(path: pathlib.Path, version: str, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    path.write_text(COMPILER.format(version=version))
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))
    return path


def test_each_compiler_has_its_own_kernels(
    compiler: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, was_built = build(tmp_path / "cache")
    assert was_built
    assert build(tmp_path / "cache") == (first, False)
    use_compiler(compiler, "2.0", monkeypatch)
    second, was_built = build(tmp_path / "cache")
    assert was_built
    assert second != first
    assert (first.read_bytes()[:4], second.read_bytes()[:4]) == (b"1.0\n", b"2.0\n")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted([first.name, second.name])


@pytest.mark.parametrize("content", [b"", b"junk!", b"1.0\n", None], ids=["empty", "junk", "no digest", "cut off"])
def test_a_damaged_file_is_built_again(compiler: pathlib.Path, tmp_path: pathlib.Path, content: bytes | None) -> None:
    made, _ = build(tmp_path / "cache")
    whole = made.read_bytes()
    made.write_bytes(whole[:-1] if content is None else content)
    assert build(tmp_path / "cache") == (made, True)
    assert made.read_bytes() == whole
    assert build(tmp_path / "cache") == (made, False)


def test_a_damaged_file_is_no_file_where_nothing_is_compiled(
    compiler: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = build(tmp_path / "cache")
    made.write_bytes(made.read_bytes()[:-1])
    with pytest.raises(BuildError, match=f"cache has {made.name}, which is damaged; fill it with --compile-only"):
        build(tmp_path / "cache", is_required=True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="there is no C\\+\\+ compiler"):
        build(tmp_path / "cache")


@pytest.mark.parametrize("compiler_name", ["false", "/no/such/compiler"])
def test_kernels_that_must_be_built_and_cannot_be_are_an_error(
    compiler_name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "find_missing_features", list)
    monkeypatch.setenv("CXX", compiler_name)
    with pytest.raises(ConfigError, match=f"cannot be built, as compile_only asks: .*{compiler_name}"):
        load_kernels(tmp_path / "cache", must_build=True)


def test_other_sources_are_compiled_anew(
    compiler: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = build(tmp_path / "cache")
    monkeypatch.setattr(BUILD, "FLAGS", ("-O0",))
    second, was_built = build(tmp_path / "cache")
    assert was_built
    assert second != first


def test_without_a_compiler_what_another_one_made_is_taken(
    compiler: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = build(tmp_path / "cache")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build(tmp_path / "cache") == (made, False)
    monkeypatch.setattr(BUILD, "FLAGS", ("-O0",))
    with pytest.raises(BuildError, match="there is no C\\+\\+ compiler 'no-such-compiler'"):
        build(tmp_path / "cache")


def test_what_is_required_is_never_compiled(compiler: pathlib.Path, tmp_path: pathlib.Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(BuildError, match="cache cannot be used: No such file or directory"):
        build(cache, is_required=True)
    cache.mkdir(mode=0o700)
    with pytest.raises(BuildError, match=r"cache has no kernels-[0-9a-f]{16}-\*.so; fill it with --compile-only"):
        build(cache, is_required=True)
    assert list(cache.iterdir()) == []
    made, _ = build(cache)
    assert build(cache, is_required=True) == (made, False)


def test_kernels_that_are_required_and_missing_end_the_start(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "find_missing_features", list)
    with pytest.raises(ConfigError, match="the kernels of the cpu device are not there, as require_cached asks: "):
        load_kernels(tmp_path, is_required=True)


def test_a_processor_that_runs_no_kernels_needs_none(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_missing_features", lambda: ["avx512f"])
    assert load_kernels(tmp_path, is_required=True) == (None, "PyTorch, for the processor lacks avx512f")


def test_a_library_that_cannot_be_loaded_is_said_and_pytorch_runs(
    compiler: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "find_missing_features", list)
    found, text = load_kernels(tmp_path / "cache")
    assert found is None
    assert text.startswith("PyTorch, for the kernels cannot be built: ")
