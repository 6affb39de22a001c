"""Kernels in C++ for bfloat16 on processors with AVX-512: the parts of a step that PyTorch is slow at.

`load_kernels` compiles them on first use and keeps them in a cache directory; where that is not possible everything
runs with PyTorch, and it says why. They take memory that torch owns; nothing of torch is compiled in.
"""

from __future__ import annotations

import pathlib
import time

from executor_svc.kernels.build import BuildError, build, find_missing_features
from executor_svc.kernels.native import NativeKernels
from holdback.errors import ConfigError
from holdback.types import CompileCounts

__all__ = ["NativeKernels", "load_kernels"]


def load_kernels(
    directory: pathlib.Path | None = None, num_threads: int = 1, *, is_required: bool = False, must_build: bool = False
) -> tuple[NativeKernels | None, str]:
    """The kernels and one sentence on what runs; None with the reason where there are none.

    Args:
        directory: where compiled kernels are kept; None is `holdback/kernels` in the user's cache directory.
        num_threads: that they run on.
        is_required: compile nothing; what this processor can run must be there.
        must_build: what this processor can run must be there or be compiled now.

    Raises:
        ConfigError: they are not there, and are required; or they cannot be built, and must be.
    """
    missing = find_missing_features()
    if missing:
        return None, f"PyTorch, for the processor lacks {', '.join(missing)}"
    started_s = time.perf_counter()
    try:
        path, was_built = build(directory, is_required=is_required)
        compiled = CompileCounts(int(not was_built), int(was_built), time.perf_counter() - started_s)
        kernels = NativeKernels(path, num_threads, compiled)
    except (BuildError, OSError) as error:
        if is_required:
            raise ConfigError(f"the kernels of the cpu device are not there, as require_cached asks: {error}") from None
        if must_build:
            raise ConfigError(f"the kernels of the cpu device cannot be built, as compile_only asks: {error}") from None
        return None, f"PyTorch, for the kernels cannot be built: {error}"
    return kernels, f"C++ with avx512_bf16, {'built now' if was_built else 'from the cache'}: {path.name}"
