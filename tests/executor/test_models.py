"""Model directories: what is read from them, and how. What is refused is in test_bad_models."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
import safetensors.torch
import structlog.testing
import torch
import transformers

from executor_svc.fingerprint import fingerprint
from executor_svc.model_config import read_config
from executor_svc.model_directory import list_weights
from executor_svc.model_probe import check_logits, find_layers
from executor_svc.models import load_model
from holdback.errors import ConfigError
from tests.executor.model_families import save_packed
from tests.executor.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, llama_config, save_model


@pytest.fixture(scope="module")
def pristine_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def model(pristine_model: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy to break."""
    return pathlib.Path(shutil.copytree(pristine_model, tmp_path / "tiny"))


def edit_json(path: pathlib.Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def shard(directory: pathlib.Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="20KB")


# What is read


def test_a_model_says_what_a_pool_must_agree_on(pristine_model: pathlib.Path) -> None:
    info = load_model(pristine_model, "float32").info
    assert info.name == "tiny"
    assert info.vocab_size == VOCAB_SIZE
    assert info.eos_token_ids == (2,)
    assert info.max_model_len == MAX_MODEL_LEN


@pytest.mark.parametrize(("generation", "config", "expected"), [
    ({"eos_token_id": [5, 2, 5]}, {"eos_token_id": 9}, (5, 2)),
    ({"eos_token_id": None}, {"eos_token_id": [9, 3]}, (9, 3)),
    ({"eos_token_id": None}, {"eos_token_id": None}, ()),
])  # fmt: skip
def test_eos_ids_are_those_of_generation_config_else_of_config(
    model: pathlib.Path, generation: dict[str, Any], config: dict[str, Any], expected: tuple[int, ...]
) -> None:
    edit_json(model / "generation_config.json", **generation)
    edit_json(model / "config.json", **config)
    assert load_model(model, "float32").info.eos_token_ids == expected


def test_max_model_len_lowers_the_models_own_limit_and_never_raises_it(pristine_model: pathlib.Path) -> None:
    assert load_model(pristine_model, "float32", 40).info.max_model_len == 40
    with pytest.raises(ConfigError, match=r"max_model_len is 65; allowed: \[2, 64\]"):
        load_model(pristine_model, "float32", 65)


def test_rope_scaling_raises_the_limit(model: pathlib.Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    edit_json(model / "config.json", rope_parameters=rope)
    assert load_model(model, "float32").info.max_model_len == 256


# Fingerprints


def fingerprint_of(directory: pathlib.Path, dtype: str = "float32", **options: Any) -> str:
    return fingerprint(read_config(directory), list_weights(directory), dtype, **options)


def test_a_fingerprint_does_not_depend_on_files_or_on_who_wrote_them(model: pathlib.Path) -> None:
    before = fingerprint_of(model)
    assert len(before) == 32 + len("-float32")
    shard(model)
    edit_json(model / "config.json", transformers_version="9.9", _name_or_path="/elsewhere", dtype="float16")
    assert len(list_weights(model)) > 1
    assert fingerprint_of(model) == before


@pytest.mark.parametrize("full_bytes", [1 << 30, 0])
def test_another_weight_configuration_or_dtype_is_another_fingerprint(model: pathlib.Path, full_bytes: int) -> None:
    before = fingerprint_of(model, full_bytes=full_bytes)
    assert fingerprint_of(model, "bfloat16", full_bytes=full_bytes) != before
    edit_json(model / "config.json", rms_norm_eps=1e-3)
    other_config = fingerprint_of(model, full_bytes=full_bytes)
    weights = safetensors.torch.load_file(model / "model.safetensors")
    weights["model.norm.weight"][-1] += 1
    safetensors.torch.save_file(weights, model / "model.safetensors")
    assert len({before, other_config, fingerprint_of(model, full_bytes=full_bytes)}) == 3


def test_a_large_tensor_of_a_very_large_model_counts_with_samples_from_start_to_end(tmp_path: pathlib.Path) -> None:
    """8 MiB in 64 samples of 16 KiB: the first and the last bytes count, one between two samples does not."""
    weights = {"w": torch.zeros(8 << 20, dtype=torch.uint8)}
    path = tmp_path / "w.safetensors"

    def of_changed(place: int) -> str:
        weights["w"].zero_()
        weights["w"][place] = 1
        safetensors.torch.save_file(weights, path)
        return fingerprint({}, [path], "float32", full_bytes=0)

    safetensors.torch.save_file(weights, path)
    before = fingerprint({}, [path], "float32", full_bytes=0)
    assert of_changed(0) != before
    assert of_changed(-1) != before
    assert of_changed(64 << 10) == before
    assert fingerprint({}, [path], "float32") != fingerprint({}, [path], "float32", full_bytes=0)


# Loading


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_cast_to_the_dtype_that_is_asked_for(pristine_model: pathlib.Path, dtype: str) -> None:
    loaded = load_model(pristine_model, dtype)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {getattr(torch, dtype)}
    assert not loaded.module.training
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())
    assert loaded.info.fingerprint.endswith(f"-{dtype}")


def test_an_unknown_dtype_is_refused(pristine_model: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int8'; allowed: float32, bfloat16, float16"):
        load_model(pristine_model, "int8")


def weights_of(directory: pathlib.Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_model(directory, "float32").module.state_dict()
    return found


def test_shards_and_links_to_them_are_read_as_one_file_is(model: pathlib.Path, tmp_path: pathlib.Path) -> None:
    expected = weights_of(model)
    shard(model)
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    assert len(list_weights(linked)) > 2
    found = weights_of(linked)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)


def test_the_same_weights_in_another_form_beside_them_are_not_read(model: pathlib.Path) -> None:
    before = load_model(model, "float32").info.fingerprint
    for name in ("consolidated.safetensors", "pytorch_model.bin", "model-00001-of-00001.safetensors"):
        (model / name).write_bytes(b"no weights")
    assert load_model(model, "float32").info.fingerprint == before


@pytest.mark.parametrize("has_both", [False, True], ids=["one", "both"])
def test_tied_embeddings_are_one_tensor_whether_the_files_have_one_or_both(
    tmp_path: pathlib.Path, has_both: bool
) -> None:
    directory = save_model(tmp_path / "tied", llama_config(tie_word_embeddings=True))
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    assert "lm_head.weight" not in weights
    if has_both:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        safetensors.torch.save_file(weights, directory / "model.safetensors", {"format": "pt"})
    module = load_model(directory, "float32").module
    assert module.lm_head.weight.data_ptr() == module.model.embed_tokens.weight.data_ptr()
    assert module.lm_head.weight.equal(weights["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_4_bits_are_unpacked_exactly(tmp_path: pathlib.Path, dtype: str) -> None:
    expected = save_packed(tmp_path / "packed")
    loaded = load_model(tmp_path / "packed", dtype)
    weights = loaded.module.state_dict()
    assert len(expected) == 6
    for name, numbers in expected.items():
        assert weights[name].dtype is getattr(torch, dtype)
        assert weights[name].float().equal(numbers), "a number of 4 bits and a power of two is exact in 16 bits"
    check_logits(loaded, find_layers(loaded))


def test_rotary_frequencies_that_old_files_hold_are_no_weights(model: pathlib.Path) -> None:
    weights = safetensors.torch.load_file(model / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    safetensors.torch.save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert load_model(model, "float32").info.vocab_size == VOCAB_SIZE


def test_loading_logs_one_line_with_bytes_and_seconds_and_prints_nothing(
    pristine_model: pathlib.Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with structlog.testing.capture_logs() as lines:
        load_model(pristine_model, "bfloat16")
    (line,) = lines
    num_weights = 2 * VOCAB_SIZE * 32 + 2 * (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 64 + 2 * 32) + 32
    assert (line["event"], line["model"], line["kind"]) == ("model_loaded", "tiny", "LlamaForCausalLM")
    assert (line["dtype"], line["bytes"]) == ("bfloat16", 2 * num_weights)
    assert 0 < line["seconds"] < 60
    assert capfd.readouterr() == ("", "")


def test_a_terminal_sees_how_far_loading_is(
    pristine_model: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_model(pristine_model, "float32")
    assert "Loading weights: 100%" in capsys.readouterr().err


PEAK = """
import pathlib, re, sys
from executor_svc.models import load_model

def peak():  # not that of getrusage, which starts with what the parent had
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

before = peak()
loaded = load_model(pathlib.Path(sys.argv[1]), sys.argv[2])
print()
print(peak() - before)
"""


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_never_holds_twice_the_files(model_directory: pathlib.Path, dtype: str) -> None:
    """At its peak, pages mapped from the files included; those are the system's to drop."""
    command = [sys.executable, "-c", PEAK, str(model_directory), dtype]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout
    peak, size = int(output.splitlines()[-1]), sum(path.stat().st_size for path in list_weights(model_directory))
    assert size / 4 < peak < 2 * size
