"""The benchmark of the `cpu` device: what it holds for possible, and that it runs."""

from __future__ import annotations

import importlib
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("cpu_limits")


@pytest.fixture
def costs(limits: Any, tmp_path: pathlib.Path) -> Any:
    """2 layers of 4 query heads and 2 KV heads of 8: 2 x (2 x 32 x (32 + 16) + 3 x 32 x 64) numbers."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads), encoding="utf-8")
    return limits.Costs.of(tmp_path)


def test_costs_follow_from_the_configuration(costs: Any) -> None:
    assert (costs.layer_params, costs.head_params, costs.kv_bytes) == (18_432, 4096, 128)


def test_a_decode_is_limited_by_memory_or_by_arithmetic(limits: Any, costs: Any) -> None:
    """One row of 100 tokens reads 45,056 bytes of weights and 12,800 of context; ten rows multiply 450,560 times."""
    slow_memory, slow_products = limits.Machine(1e-3, 1e9), limits.Machine(1e9, 1e-3)
    assert costs.decode_s(slow_memory, 1, 100) == pytest.approx(57_856 / 1e6)
    assert costs.decode_s(slow_products, 10, 100) == pytest.approx(450_560 / 1e6)


def test_a_run_is_all_prompts_and_all_outputs_but_the_first(limits: Any, costs: Any) -> None:
    machine = limits.Machine(1e-3, 1e-3)
    expected = costs.prefill_s(machine, 3 * 16) + 7 * costs.decode_s(machine, 3, 16 + 4)
    assert costs.prefill_s(machine, 1) == pytest.approx(36_864 / 1e6)
    assert costs.run_s(machine, 3, 16, 8) == pytest.approx(expected)


@pytest.mark.model
def test_the_benchmark_runs(model_directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / "cpu_serving.py"), str(model_directory), "--quick", "--json", str(file)]
    done = subprocess.run(
        [*command, "--without-transformers"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text(encoding="utf-8"))
    assert [row["streams"] for row in result["rows"]] == [1, 2]
    for row in [*result["rows"], result["prefill"]]:
        assert row["holdback_tok_s"] > 0
        assert row["vllm_tok_s"] is row["transformers_tok_s"] is None
        assert row["share_of_limit"] > 0
    assert result["differing"]["tokens"] == 8
