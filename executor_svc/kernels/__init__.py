"""Kernels in C++ for bfloat16 on processors with AVX-512: the parts of a step that PyTorch is slow at.

`load_kernels` compiles them on first use and keeps them in a cache directory; where that is not possible everything
runs with PyTorch, and it says why. They take memory that torch owns; nothing of torch is compiled in.
"""

from __future__ import annotations

import pathlib

from executor_svc.kernels.build import BuildError, build, find_missing_features
from executor_svc.kernels.native import NativeKernels

__all__ = ["NativeKernels", "load_kernels"]


def load_kernels(directory: pathlib.Path | None = None) -> tuple[NativeKernels | None, str]:
    """The kernels and one sentence on what runs; None with the reason where there are none.

    Args:
        directory: where compiled kernels are kept; None is `holdback/kernels` in the user's cache directory.
    """
    missing = find_missing_features()
    if missing:
        return None, f"PyTorch, for the processor lacks {', '.join(missing)}"
    try:
        path, was_built = build(directory)
        kernels = NativeKernels(path)
    except (BuildError, OSError) as error:
        return None, f"PyTorch, for the kernels cannot be built: {error}"
    return kernels, f"C++ with avx512_bf16, {'built now' if was_built else 'from the cache'}: {path.name}"
