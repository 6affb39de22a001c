"""Tokens that the kernels draw are those that PyTorch draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executor_svc.draw import draw
from executor_svc.kernels import NativeKernels, load_kernels
from executor_svc.kernels.build import find_missing_features
from holdback.types import SamplingParams

NO_KERNELS = find_missing_features()
pytestmark = pytest.mark.skipif(bool(NO_KERNELS), reason=f"the processor lacks {', '.join(NO_KERNELS)}")

ROWS = 64
LARGEST_UNIFORM = 1 - 2**-24


@pytest.fixture(scope="module")
def native() -> NativeKernels:
    found, text = load_kernels(num_threads=2)
    assert found is not None, text
    return found


def random_logits(kind: str, size: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(size)
    if kind == "many equal":
        return torch.randint(-2, 3, (ROWS, size), generator=random).float()
    logits = torch.randn(ROWS, size, generator=random) * 3
    if kind == "half excluded":
        logits[:, torch.randperm(size, generator=random)[: size // 2]] = float("-inf")
    return logits


@pytest.mark.parametrize("size", [1, 2, 17, 100, 1000])
@pytest.mark.parametrize("kind", ["all different", "many equal", "half excluded"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1e-9},
        {"temperature": 5.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_p": 0.9, "top_k": 20},
        {"min_p": 0.1},
        {"min_p": 0.05, "top_p": 0.7, "top_k": 50},
    ],
    ids=str,
)
def test_the_kernels_draw_what_pytorch_draws(
    native: NativeKernels, params: dict[str, Any], kind: str, size: int
) -> None:
    logits = random_logits(kind, size)
    uniform = torch.rand(ROWS, generator=torch.Generator().manual_seed(1))
    uniform[0], uniform[1] = 0.0, LARGEST_UNIFORM
    rows = [SamplingParams(**({"temperature": 0.8} | params))] * ROWS
    drawn = native.draw(logits, rows, uniform)
    assert drawn.equal(draw(logits, rows, uniform))
    assert logits[torch.arange(ROWS), drawn].isfinite().all()


def test_each_row_goes_by_its_own_parameters_and_by_nothing_else(native: NativeKernels) -> None:
    logits, uniform = random_logits("all different", 100), torch.rand(ROWS, generator=torch.Generator().manual_seed(2))
    kinds = [SamplingParams(temperature=1.0), SamplingParams(top_k=2), SamplingParams(top_p=0.3, temperature=2.0)]
    rows = [kinds[row % len(kinds)] for row in range(ROWS)]
    together = native.draw(logits, rows, uniform)
    alone = [native.draw(logits[row : row + 1], [rows[row]], uniform[row : row + 1]) for row in range(ROWS)]
    assert together.equal(torch.cat(alone))


def test_a_row_without_a_number_that_can_be_drawn_gives_a_token_of_the_vocabulary(native: NativeKernels) -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        params = [SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1)]
        (drawn,) = native.draw(torch.full((1, 40), value), params, torch.tensor([0.5])).tolist()
        assert 0 <= drawn < 40
