"""The random number of each output, from the request's seed and the output's index alone.

It is the top 24 bits of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014) at
place `output_index` of the sequence that starts from the mixed seed. The seed is mixed first so that seeds that differ
by 1, as those of the n choices of one request do, share no part of a sequence. That is done once for each request.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from executor_svc.devices.base import Float32, Int64

UInt64 = npt.NDArray[np.uint64]

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_BITS = 0xFFFF_FFFF_FFFF_FFFF

# The same as numpy's, made once: they are used for every step.
_GAMMA_64 = np.uint64(_GOLDEN_GAMMA)
_FACTORS_64 = tuple(np.uint64(factor) for factor in _FACTORS)
_SHIFTS_64 = tuple(np.uint64(shift) for shift in _SHIFTS)
_ONE_64, _DROPPED_64 = np.uint64(1), np.uint64(40)
_UINT24 = np.float32(2.0**-24)


def mix_seed(seed: int) -> int:
    """Where a request's sequence starts: [0, 2**64), from its signed seed of 64 bits."""
    z = ((seed & _BITS) + _GOLDEN_GAMMA) & _BITS
    z = ((z ^ (z >> _SHIFTS[0])) * _FACTORS[0]) & _BITS
    z = ((z ^ (z >> _SHIFTS[1])) * _FACTORS[1]) & _BITS
    return z ^ (z >> _SHIFTS[2])


def uniform_numbers(mixed_seeds: UInt64, output_indices: Int64) -> Float32:
    """float32 [rows] in [0, 1), on a grid of 2**-24.

    Args:
        mixed_seeds: uint64 [rows], each from `mix_seed`.
        output_indices: int64 [rows].
    """
    z = output_indices.astype(np.uint64)
    z += _ONE_64
    z *= _GAMMA_64
    z += mixed_seeds
    z ^= z >> _SHIFTS_64[0]
    z *= _FACTORS_64[0]
    z ^= z >> _SHIFTS_64[1]
    z *= _FACTORS_64[1]
    z ^= z >> _SHIFTS_64[2]
    z >>= _DROPPED_64
    numbers = z.astype(np.float32)
    numbers *= _UINT24
    return numbers
