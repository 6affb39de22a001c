"""Random numbers: which ones, and what they depend on."""

from __future__ import annotations

import numpy as np
import pytest

from executor_svc.random_numbers import mix_seed, uniform_numbers


def uniform(seeds: list[int], indices: list[int]) -> list[float]:
    mixed = np.array([mix_seed(seed) for seed in seeds], np.uint64)
    return [float(number) for number in uniform_numbers(mixed, np.array(indices, np.int64))]


@pytest.mark.parametrize(
    ("seed", "index", "expected"),
    [(0, 0, 10946269), (0, 1, 11764387), (1, 0, 6177195), (-1, 0, 6144522), (-1, 7, 12144326)],
)
def test_they_are_those_of_splitmix64(seed: int, index: int, expected: int) -> None:
    """The literals are the top 24 bits, worked out with whole numbers from the published algorithm."""
    assert uniform([seed], [index]) == [expected / 2**24]


@pytest.mark.case("B32")
def test_they_depend_on_seed_and_index_alone() -> None:
    together = uniform([42, 7, 42], [3, 3, 4])
    assert together == [*uniform([42], [3]), *uniform([7], [3]), *uniform([42], [4])]
    assert len(set(together)) == 3


def test_they_fill_the_unit_interval_evenly_for_neighbouring_seeds() -> None:
    numbers = np.array(uniform([seed for seed in range(100) for _ in range(100)], [*range(100)] * 100))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
    assert abs(counts - 1000).max() < 150  # five standard deviations of 30


def test_what_is_given_is_not_changed() -> None:
    mixed, indices = np.array([mix_seed(1)], np.uint64), np.array([5], np.int64)
    assert uniform_numbers(mixed, indices).dtype == np.float32
    assert (mixed.tolist(), indices.tolist()) == ([mix_seed(1)], [5])
