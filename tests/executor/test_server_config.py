"""Settings of an executor: what follows from what, and what is refused before anything is loaded."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from executor_svc.config import ExecutorConfig, build_limits
from executor_svc.devices import create_device
from executor_svc.devices.simulated import SimulatedDevice
from holdback.errors import ConfigError


def load(*arguments: str, environment: dict[str, str] | None = None) -> ExecutorConfig:
    return ExecutorConfig.load(["--scheduler", "127.0.0.1:7000", *arguments], environment or {})


def build(**changes: Any) -> ExecutorConfig:
    return ExecutorConfig(scheduler="127.0.0.1:7000", device="simulated", **changes)


def test_the_defaults_are_those_that_are_documented() -> None:
    config = load("--model", "somewhere")
    assert (config.device, config.dtype, config.block_size) == ("cpu", "bfloat16", 16)
    assert (config.num_seqs, config.num_batched_tokens) == (32, 512)
    assert (config.num_blocks, config.kv_cache_bytes, config.max_model_len) == (None, None, None)


def test_default_buckets_are_powers_of_two_up_to_what_fits() -> None:
    limits = build_limits(build(), max_model_len=2048, num_blocks=129)
    assert limits.num_batched_tokens_buckets == (128, 256, 512)
    assert limits.num_seqs_buckets == (1, 2, 4, 8, 16, 32)
    short = build_limits(build(), max_model_len=300, num_blocks=20)
    assert (short.num_batched_tokens_buckets, short.max_num_batched_tokens) == ((128, 256, 300), 512)


def test_given_buckets_set_the_limits_that_are_not_given() -> None:
    config = load("--model", "m", "--num-batched-tokens-buckets", "256,1024", "--num-seqs-buckets", "[4, 8]")
    assert config.num_batched_tokens_buckets == (256, 1024)
    assert (config.num_batched_tokens, config.num_seqs) == (1024, 8)


def test_buckets_are_read_from_the_environment_too() -> None:
    config = load("--model", "m", environment={"HOLDBACK_EXECUTOR__NUM_SEQS_BUCKETS": "1,2"})
    assert config.num_seqs == 2


def test_the_kv_memory_budget_is_read_from_the_environment_too() -> None:
    environment = {
        "HOLDBACK_EXECUTOR__KV_MEMORY_FRACTION": "0.8",
        "HOLDBACK_EXECUTOR__KV_MEMORY_CAP_FRACTION": "0.5",
        "HOLDBACK_EXECUTOR__KV_MEMORY_MIN_BYTES": "1073741824",
    }
    config = load("--model", "m", environment=environment)
    assert (config.kv_memory_fraction, config.kv_memory_cap_fraction, config.kv_memory_min_bytes) == (0.8, 0.5, 2**30)
    assert load("--model", "m").kv_memory_cap_fraction == 0.30
    assert load("--device", "neuron", "--model", "m", "--kv-memory-min-bytes", "5").kv_memory_min_bytes == 5


def test_a_scheduler_is_not_needed_to_compile() -> None:
    assert ExecutorConfig.load(["--model", "m", "--compile-only"], {}).scheduler is None


def test_every_setting_is_in_the_documentation() -> None:
    text = (pathlib.Path(__file__).parents[2] / "docs" / "executor.md").read_text(encoding="utf-8")
    assert [name for name in ExecutorConfig.model_fields if f"`{name}`" not in text] == []


def test_an_executor_has_a_name_without_being_given_one() -> None:
    assert 1 <= len(load("--model", "m").name) <= 128
    assert load("--model", "m", "--executor-id", "left").name == "left"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "model is required by the device cpu"),
        (["--device", "neuron"], "model is required by the device neuron"),
        (["--device", "gpu"], "device is 'gpu'; allowed: cpu, neuron, simulated"),
        (["--model", "m", "--decode-context-length-buckets", "256"], "is [256]; allowed on the device cpu: none"),
        (["--model", "m", "--neuron-cores", "0-3"], "neuron_cores is '0-3'; allowed on the device cpu: none"),
        (["--device", "neuron", "--model", "m", "--neuron-cores", "all"], "neuron_cores is 'all'"),
        (["--device", "simulated", "--num-blocks", "9", "--kv-cache-bytes", "99"], "allowed: one of them"),
        (["--device", "simulated", "--kv-cache-bytes", "99"], "allowed on the device simulated: num_blocks"),
        (
            ["--model", "m", "--num-blocks", "9", "--kv-memory-fraction", "0.5"],
            "kv_memory_fraction is 0.5; allowed: one",
        ),
        (["--device", "simulated", "--kv-memory-fraction", "0.5"], "kv_memory_fraction is 0.5; allowed on the device"),
        (["--model", "m", "--kv-memory-fraction", "0"], "kv_memory_fraction is '0'"),
        (["--model", "m", "--kv-memory-cap-fraction", "1.5"], "kv_memory_cap_fraction is '1.5'"),
        (["--model", "m", "--kv-memory-min-bytes", "-1"], "kv_memory_min_bytes is '-1'"),
        *[
            (["--model", "m", *more, flag, "0.2" if "cap" in flag else "1"], "allowed: with kv_memory_fraction")
            for flag in ("--kv-memory-cap-fraction", "--kv-memory-min-bytes")
            for more in ([], ["--device", "simulated"], ["--device", "neuron", "--num-blocks", "9"])
        ],
        (["--model", "m", "--scheduler", "null"], "scheduler is required"),
        (["--model", "m", "--compile-only", "--require-cached"], "compile_only and require_cached are both set"),
        (["--model", "m", "--dtype", "int8"], "dtype is 'int8'"),
        (["--model", "m", "--block-size", "0"], "block_size is '0'"),
        (["--model", "m", "--num-seqs-buckets", "a,b"], "num_seqs_buckets"),
        (["--model", "m", "--num-seqs-buckets", ""], "num_seqs_buckets"),
        (["--model", "m", "--scheduler", "localhost"], "scheduler is 'localhost'; allowed: host:port"),
        (["--model", "m", "--scheduler", ":7000"], "scheduler is ':7000'; allowed: host:port"),
        (["--model", "m", "--scheduler", "a:70000"], "scheduler is 'a:70000'; allowed: host:port"),
        (["--model", "m", "--advertise-address", "example.com"], "allowed: a literal IP address"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(*arguments)


@pytest.mark.case("B02")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 17}, "max_model_len is 512, which needs 32 blocks of 16 tokens, but num_blocks is 17"),
        ({"num_batched_tokens_buckets": (128, 256), "max_num_batched_tokens": 300}, "the last one is 300"),
        ({"num_seqs_buckets": (2, 1)}, "num_seqs_buckets is [2, 1]; allowed: positive numbers, strictly ascending"),
        ({"max_num_seqs": 600}, "max_num_batched_tokens is 512; allowed: at least max_num_seqs, which is 600"),
        ({"simulated_eos_token_ids": (32_000,)}, "simulated_eos_token_ids is 32000; allowed: [0, 32000)"),
        ({"simulated_hang_token_id": 99_999}, "simulated_hang_token_id is 99999; allowed: [0, 32000)"),
    ],
)
def test_limits_that_do_not_fit_are_refused_with_both_numbers(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        create_device(build(max_model_len=512, **changes))


@pytest.mark.case("B02")
def test_limits_are_refused_before_a_model_is_looked_for() -> None:
    config = load("--model", "no-such-directory", "--max-model-len", "512", "--num-blocks", "17")
    with pytest.raises(ConfigError, match="max_model_len is 512, which needs 32 blocks"):
        create_device(config)


def test_shapes_are_refused_before_the_weights_of_a_model_are_looked_for(tmp_path: pathlib.Path) -> None:
    model_config = {"model_type": "llama", "architectures": ["L"], "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(model_config), encoding="utf-8")
    config = load("--model", str(tmp_path), "--num-batched-tokens-buckets", "512,128")
    with pytest.raises(ConfigError, match="strictly ascending"):
        create_device(config)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no config.json that can be read: No such file or directory"),
        ({"config.json": "[]"}, "has a config.json of 2 bytes that is none; allowed: a JSON object"),
        ({"config.json": '{"model_type": "llama", "architectures": ["L"]}'}, "has no weights in model.safetensors"),
    ],
)
def test_a_directory_that_is_no_model_is_refused_without_loading_torch(
    files: dict[str, str], message: str, tmp_path: pathlib.Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    code = (
        "import sys\n"
        "from executor_svc.config import ExecutorConfig\n"
        "from executor_svc.devices import create_device\n"
        "from holdback.errors import ConfigError\n"
        "config = ExecutorConfig(scheduler='127.0.0.1:7000', model=sys.argv[1])\n"
        "try:\n"
        "    create_device(config)\n"
        "except ConfigError as error:\n"
        "    print(error, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"model directory '{tmp_path}' {message}")
    assert done.stdout.endswith(" False\n")


def test_a_simulated_device_has_the_vocabulary_of_the_model_that_it_is_given(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 49152, "eos_token_id": [2, 7]}')
    model = create_device(build(model=tmp_path)).model
    assert (model.vocab_size, model.eos_token_ids) == (49152, (2, 7))
    model = create_device(build(model=tmp_path, simulated_vocab_size=60_000, simulated_eos_token_ids=(5,))).model
    assert (model.vocab_size, model.eos_token_ids) == (60_000, (5,))
    model = create_device(build(model=tmp_path / "none")).model
    assert (model.vocab_size, model.eos_token_ids) == (32_000, (2,))


def test_the_simulated_device_is_as_configured() -> None:
    device = create_device(
        build(
            max_model_len=64,
            max_num_seqs=2,
            simulated_vocab_size=116,
            simulated_fingerprint="other",
            simulated_eos_token_ids=(52,),
        )
    )
    assert isinstance(device, SimulatedDevice)
    assert (device.model.fingerprint, device.model.vocab_size, device.model.eos_token_ids) == ("other", 116, (52,))
    assert device.limits.num_blocks == 1 + 2 * 4
    assert device.limits.num_batched_tokens_buckets == (64,)
