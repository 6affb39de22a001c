"""The benchmarks run and write what they promise. No time is asserted here; sizes of messages are."""

from __future__ import annotations

import importlib
import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from tests.gateway.small_tokenizers import make_tokenizer, save_directory

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
ATTEMPT_S = 60.0


def run_quick(script: str, folder: pathlib.Path, *arguments: str) -> dict[str, Any]:
    """What a benchmark writes with --quick and without a peer."""
    file = folder / "result.json"
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--quick", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ATTEMPT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def test_scheduler_step_times_every_state_with_and_without_the_wire(tmp_path: pathlib.Path):
    result = run_quick("scheduler_step.py", tmp_path)

    states = [(row["running"], row["waiting"], row["async"]) for row in result["rows"]]
    assert states == [(n, waiting, is_async) for n in (8, 64) for is_async in (False, True) for waiting in (0, 1000)]
    refusals = [row["refused_by"] for row in result["refused_head"]]
    assert refusals == ["max_model_len", "reserved", "phased"] * 4
    for row in result["rows"]:
        assert row.keys() == {"running", "waiting", "async", "holdback_us", "holdback_wire_us", "vllm_us"}
        assert 0 < row["holdback_us"] < row["holdback_wire_us"]
        assert row["vllm_us"] is None


@pytest.mark.loopback
def test_a_steady_decode_step_stays_within_its_bytes(tmp_path: pathlib.Path):
    result = run_quick("rpc_step.py", tmp_path)

    assert [(row["running"], row["async"]) for row in result["rows"]] == [(8, False), (8, True)]
    for row in result["rows"]:
        assert 0 < row["bytes_down"] <= 64
        assert 0 < row["bytes_up"] <= 64 + 4 * 8
        assert row["step_us"] > 0
        assert row["vllm_step_us"] is None


@pytest.mark.loopback
def test_device_idle_counts_changes_and_idle_time(tmp_path: pathlib.Path):
    result = run_quick("device_idle.py", tmp_path)

    (row,) = result["rows"]
    assert (row["step_ms"], row["streams"], row["async"], row["load"]) == (5, 8, True, "changing")
    assert row["steps"] > 2
    assert 0 <= row["idle_pct"] < 100
    assert row["vllm_idle_pct"] is None


@pytest.mark.loopback
def test_many_executors_are_driven_by_one_scheduler(tmp_path: pathlib.Path):
    result = run_quick("many_executors.py", tmp_path)

    assert result.keys() == {"rows", "breaks_at"}
    (row,) = result["rows"]
    assert (row["executors"], row["streams"]) == (2, 16)
    assert row["steps_per_s"] > 0
    assert 0 <= row["idle_pct"] < 100


@pytest.mark.loopback
def test_the_gateway_is_measured_over_both_ways(tmp_path: pathlib.Path):
    directory = save_directory(tmp_path / "tokenizer", make_tokenizer("byte_level"))
    (directory / "config.json").write_text('{"vocab_size": 512, "eos_token_id": 2}')
    result = run_quick("gateway.py", tmp_path, str(directory), "--parts", "added,streams")

    assert [row["what"] for row in result["added"]] == ["gap - step", "scheduler to client"]
    assert [row["over"] for row in result["streams"]] == ["gRPC", "SSE"]
    for row in result["streams"]:
        assert 0 < row["gap_median_ms"] <= row["gap_p99_ms"] <= row["gap_max_ms"]


def test_each_rule_of_admission_runs_more_streams_than_the_one_before(tmp_path: pathlib.Path):
    result = run_quick("admission.py", tmp_path)

    assert [row["kv_admission"] for row in result["rows"]] == ["max_model_len", "reserved", "phased"] * 2
    ratios = result["ratios"]
    assert ratios["fixed: streams, reserved / max_model_len"] >= 40
    assert ratios["mixed: streams, phased / reserved"] >= 1.3


def test_idle_time_runs_from_the_end_of_a_step_to_the_next_arrival(monkeypatch: pytest.MonkeyPatch):
    """Steps of 10 ns. The third arrives while the second runs, so it ends at 30; the fourth comes 5 ns later."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    idle_of = importlib.import_module("idle").idle_of
    records = [(0, 10), (10, 10), (15, 10), (35, 10), (1000, 10)]

    idle = idle_of([records], 0, 100)

    assert idle.num_steps == 3
    assert idle.largest_gap_ms == 5e-6
    assert idle.share == 5 / 35
