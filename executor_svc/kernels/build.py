"""Compiling the kernels once for each version of them, with the machine's C++ compiler.

A library ends with the digest of all before it, which the loader passes over: loading one that was cut off would end
the process with a signal, at every start again.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence

from executor_svc.cache_directory import CacheDirectoryError, prepare_directory, user_directory

SOURCES = pathlib.Path(__file__).parent
FEATURES = ("avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", *(f"-m{name.replace('_', '')}" for name in FEATURES))
_TIMEOUT_S = 120
_DIGEST_BYTES = hashlib.sha256().digest_size


class BuildError(Exception):
    """Why there are no kernels."""


def find_missing_features(cpu_info: pathlib.Path = pathlib.Path("/proc/cpuinfo")) -> list[str]:
    """What the kernels use and this processor lacks, or does not say that it has."""
    try:
        text = cpu_info.read_text(encoding="utf-8")
    except OSError:
        return list(FEATURES)
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), [])
    return [name for name in FEATURES if name not in flags]


def build(directory: pathlib.Path | None = None, *, is_required: bool = False) -> tuple[pathlib.Path, bool]:
    """Path of the compiled kernels, and whether they were compiled now.

    Each compiler has its own. Without a compiler, those that any made from the same sources are taken. A damaged file
    counts for nothing, and is replaced.

    Args:
        directory: where they are kept; None is `holdback/kernels` in the user's cache directory.
        is_required: compile nothing, and take those of any compiler.

    Raises:
        BuildError: there is no compiler, it failed, others could write to the directory, or nothing is there.
        OSError: the directory cannot be written to.
    """
    directory = directory or user_directory("kernels")
    try:
        prepare_directory(directory, is_read_only=is_required)
    except CacheDirectoryError as error:
        raise BuildError(f"{directory} {error}") from None
    sources = _digest_of_sources()
    if is_required or not _has_compiler():
        found = sorted(directory.glob(f"kernels-{sources}-*.so"))
        if whole := [path for path in found if _is_whole(path)]:
            return whole[-1], False
        if is_required:
            problem = f"has {found[-1].name}, which is damaged" if found else f"has no kernels-{sources}-*.so"
            raise BuildError(f"{directory} {problem}; fill it with --compile-only")
    compiler = _find_compiler()
    path = directory / f"kernels-{sources}-{_digest_of(compiler)}.so"
    if _is_whole(path):
        return path, False
    with tempfile.TemporaryDirectory(dir=directory) as aside:
        made = pathlib.Path(aside) / path.name
        compile_kernels(made)
        content = made.read_bytes()
        made.write_bytes(content + hashlib.sha256(content).digest())
        made.replace(path)  # at once, so that another process never loads half a file
    return path, True


def _is_whole(path: pathlib.Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def compile_kernels(path: pathlib.Path, flags: Sequence[str] = FLAGS) -> None:
    """Writes the library to `path`. Raises BuildError."""
    _run([_find_compiler(), *flags, str(SOURCES / "kernels.cpp"), "-o", str(path)])


def _has_compiler() -> bool:
    try:
        _find_compiler()
    except BuildError:
        return False
    return True


def _find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if path := shutil.which(name):
            return path
    raise BuildError(f"there is no C++ compiler{f' {wanted!r}, as CXX says' if wanted else ''}")


def _digest_of(compiler: str) -> str:
    return hashlib.sha256(_run([compiler, "--version"]).encode()).hexdigest()[:8]


def _digest_of_sources() -> str:
    """Of the sources and how they are compiled."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip()[:300] or "it said nothing"
        raise BuildError(f"{command[0]} ended with {done.returncode}: {said}")
    return done.stdout
