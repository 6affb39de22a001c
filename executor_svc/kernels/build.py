"""Compiling the kernels once for each version of them, with the machine's C++ compiler."""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile

SOURCES = pathlib.Path(__file__).parent
FEATURES = ("avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fopenmp", *(f"-m{name.replace('_', '')}" for name in FEATURES))
_TIMEOUT_S = 120


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


def default_directory() -> pathlib.Path:
    """In the user's cache directory, where nobody else can put anything."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "holdback" / "kernels"


def build(directory: pathlib.Path | None = None) -> tuple[pathlib.Path, bool]:
    """Path of the compiled kernels, and whether they were compiled now.

    Raises:
        BuildError: there is no compiler, it failed, or others could write to the directory.
        OSError: the directory cannot be written to.
    """
    directory = directory or default_directory()
    compiler = _find_compiler()
    path = directory / f"kernels-{_key(compiler)}.so"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_owner(directory)
    if path.is_file():
        return path, False
    with tempfile.TemporaryDirectory(dir=directory) as aside:
        made = pathlib.Path(aside) / path.name
        _run([compiler, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(made)])
        made.replace(path)  # at once, so that another process never loads half a file
    return path, True


def _check_owner(directory: pathlib.Path) -> None:
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise BuildError(f"{directory} can be written to by others, and what is in it would be run")


def _find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if path := shutil.which(name):
            return path
    raise BuildError(f"there is no C++ compiler{f' {wanted!r}, as CXX says' if wanted else ''}")


def _key(compiler: str) -> str:
    digest = hashlib.sha256(_run([compiler, "--version"]).encode())
    digest.update(" ".join(FLAGS).encode())
    for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[:300]}")
    return done.stdout
