"""Models cut over two ranks, of each kind of plan: the numbers of the whole model, and the share that a rank keeps."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from dataclasses import dataclass

import pytest

from executor_svc.devices.base import StepResult
from tests.executor.model_families import save_family
from tests.executor.rank_steps import group_of_two, run_rank, run_steps
from tests.executor.tiny_models import build_device, llama_config, save_model

pytestmark = pytest.mark.loopback

ROOT = pathlib.Path(__file__).resolve().parents[2]
UNEVEN = "one-kv-head"
FAMILIES = (UNEVEN, "smollm2", "qwen2", "qwen3", "gemma3", "phi3", "qwen3-moe", "gpt-oss")
# The KV heads that every rank has whose attention is whole: by the plan, or because ranks do not divide the heads.
WHOLE_ATTENTION = {"phi3": 2, "gpt-oss": 2, UNEVEN: 1}


@dataclass
class Share:
    """What rank 0 has of a model, and what it said of the steps."""

    results: list[StepResult]
    num_kv_heads: set[int]
    local_bytes: int
    fingerprint: str
    num_threads: list[int]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    root = tmp_path_factory.mktemp("families")
    uneven = {UNEVEN: save_model(root / UNEVEN, llama_config(num_key_value_heads=1))}
    return uneven | {family: save_family(root / family, family) for family in FAMILIES if family != UNEVEN}


@pytest.fixture(scope="module")
def shares(directories: dict[str, pathlib.Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Share]:
    """Of rank 0 of two, which is this process."""
    meeting_file = tmp_path_factory.mktemp("ranks") / "meeting"
    arguments = [str(meeting_file), *(str(path) for path in directories.values())]
    child = subprocess.Popen([sys.executable, "-m", "tests.executor.rank_steps", *arguments], cwd=ROOT)
    try:
        with group_of_two(0, meeting_file) as group:
            found = {}
            num_threads = [group.num_threads(wanted) for wanted in (1, 2, 5)]
            for (device, results), family in zip(run_rank(group, list(directories.values())), FAMILIES, strict=True):
                weights = [getattr(weight, "_local_tensor", weight) for weight in device._model.module.parameters()]
                heads = {pages.shape[2] for pages in device.kv_cache.keys}
                num_bytes = sum(weight.nbytes for weight in weights)
                found[family] = Share(results, heads, num_bytes, device.model.fingerprint, num_threads)
        assert child.wait(60) == 0
    finally:
        child.kill()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_tokens_and_the_logits_of_one(
    family: str, directories: dict[str, pathlib.Path], shares: dict[str, Share]
) -> None:
    whole = build_device(directories[family])
    expected = run_steps(whole)
    for number, (found, wanted) in enumerate(zip(shares[family].results, expected, strict=True)):
        assert found.token_ids.tolist() == wanted.token_ids.tolist(), f"step {number}"
        for row, (ours, theirs) in enumerate(zip(found.logprobs, wanted.logprobs, strict=True)):
            if theirs is None:
                assert ours is None
                continue
            assert ours is not None
            by_token = dict(zip(ours.top_token_ids, ours.top_logprobs, strict=True))
            for token_id, value in zip(theirs.top_token_ids, theirs.top_logprobs, strict=True):
                assert by_token[token_id] == pytest.approx(value, abs=1e-4), f"step {number}, row {row}"
    assert shares[family].fingerprint == whole.model.fingerprint
    whole.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_keeps_its_share_of_the_heads(family: str, shares: dict[str, Share]) -> None:
    assert shares[family].num_kv_heads == {WHOLE_ATTENTION.get(family, 1)}


def test_ranks_share_the_threads_and_each_has_one(shares: dict[str, Share]) -> None:
    assert shares["smollm2"].num_threads == [1, 1, 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_reads_about_half_of_the_weights(
    family: str, directories: dict[str, pathlib.Path], shares: dict[str, Share]
) -> None:
    stored = (directories[family] / "model.safetensors").stat().st_size
    assert shares[family].local_bytes < (0.7 if family in WHOLE_ATTENTION else 0.6) * stored
