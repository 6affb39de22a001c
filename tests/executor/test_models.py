"""Model directories: what is read from them, and what is refused before anything runs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from executor_svc import model_probe
from executor_svc.attention import AttentionCall, PagedContext
from executor_svc.fingerprint import fingerprint
from executor_svc.model_directory import list_weights, read_config
from executor_svc.models import load_model
from holdback.errors import ConfigError
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


def cut_in_half(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


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


@pytest.mark.parametrize("eos", [128, -1, "</s>"])
def test_an_eos_id_outside_the_vocabulary_is_refused(model: pathlib.Path, eos: object) -> None:
    edit_json(model / "generation_config.json", eos_token_id=eos)
    with pytest.raises(ConfigError, match=rf"eos_token_id is {eos}; allowed: \[0, 128\)"):
        load_model(model, "float32")


def test_max_model_len_lowers_the_models_own_limit_and_never_raises_it(pristine_model: pathlib.Path) -> None:
    assert load_model(pristine_model, "float32", 40).info.max_model_len == 40
    with pytest.raises(ConfigError, match=r"max_model_len is 65; allowed: \[2, 64\]"):
        load_model(pristine_model, "float32", 65)


def test_rope_scaling_raises_the_limit(model: pathlib.Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    edit_json(model / "config.json", rope_parameters=rope)
    assert load_model(model, "float32").info.max_model_len == 256


def test_weights_are_cast_to_the_dtype_that_is_asked_for(pristine_model: pathlib.Path) -> None:
    loaded = load_model(pristine_model, "bfloat16")
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}
    assert not loaded.module.training
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())


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


# What is refused


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (lambda model: shutil.rmtree(model), "is no directory"),
        (lambda model: (model / "config.json").unlink(), "has no config.json that can be read: No such file"),
        (lambda model: (model / "config.json").write_text("{"), "has a config.json that is not JSON"),
        (lambda model: (model / "config.json").write_text("[1]"), "has a config.json of 3 bytes that is none"),
        (lambda model: edit_json(model / "config.json", architectures=None), "config.json without architectures"),
        (lambda model: edit_json(model / "config.json", model_type=None), "config.json without model_type"),
        (lambda model: edit_json(model / "config.json", model_type="bert"), "transformers can|missing keys"),
        (lambda model: edit_json(model / "config.json", model_type="nothing"), "transformers can load"),
        (lambda model: edit_json(model / "config.json", hidden_size=64), "transformers can|mismatched keys"),
        (lambda model: edit_json(model / "config.json", num_hidden_layers=3), "missing keys: model.layers.2"),
        (lambda model: edit_json(model / "config.json", quantization_config={"bits": 4}), "quantized weights"),
        (lambda model: (model / "model.safetensors").unlink(), "no weights in .*safetensors; other forms are not read"),
        (lambda model: cut_in_half(model / "model.safetensors"), "shard model.safetensors that is cut off"),
        (lambda model: (model / "model.safetensors").write_bytes(b""), "shard model.safetensors that is cut off"),
    ],
)  # fmt: skip
def test_a_directory_that_is_no_model_is_refused_with_what_is_wrong(
    model: pathlib.Path, breaks: Callable[[pathlib.Path], object], message: str
) -> None:
    breaks(model)
    with pytest.raises(ConfigError, match=message) as error:
        load_model(model, "float32")
    assert str(model) in error.value.message


def test_a_missing_shard_is_named(model: pathlib.Path) -> None:
    shard(model)
    missing = list_weights(model)[1]
    missing.unlink()
    with pytest.raises(ConfigError, match=f"lacks the shard {missing.name}"):
        load_model(model, "float32")


def test_an_index_cannot_name_files_elsewhere(model: pathlib.Path) -> None:
    shard(model)
    edit_json(model / "model.safetensors.index.json", weight_map={"lm_head.weight": "../outside.safetensors"})
    with pytest.raises(ConfigError, match=r"names the shard '\.\./outside\.safetensors'; allowed: a file name"):
        load_model(model, "float32")


def test_code_in_a_model_directory_is_never_run(model: pathlib.Path) -> None:
    edit_json(
        model / "config.json",
        model_type="their_own",
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )
    (model / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ConfigError, match="holds nothing that transformers can load"):
        load_model(model, "float32")


def test_loading_prints_nothing(pristine_model: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(pristine_model, "float32")
    assert capfd.readouterr() == ("", "")


def test_an_unknown_dtype_is_refused(pristine_model: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="dtype is 'int8'; allowed: float32, bfloat16"):
        load_model(pristine_model, "int8")


# The probe


def probe(directory: pathlib.Path, dtype: str = "float32") -> None:
    loaded = load_model(directory, dtype)
    model_probe.check_logits(loaded, model_probe.find_layers(loaded))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_can_be_served_passes_the_probe(pristine_model: pathlib.Path, dtype: str) -> None:
    probe(pristine_model, dtype)


def test_the_probe_finds_what_each_layer_keeps(pristine_model: pathlib.Path) -> None:
    layers = model_probe.find_layers(load_model(pristine_model, "float32"))
    assert [(layer.num_kv_heads, layer.head_dim) for layer in layers] == [(2, 8), (2, 8)]


def test_a_model_that_never_calls_the_attention_is_refused(tmp_path: pathlib.Path) -> None:
    config = transformers.BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4)
    save_model(tmp_path / "bloom", config)
    with pytest.raises(ConfigError, match="has 2 layers and 0 attention calls; allowed: one of each layer"):
        probe_with_limit(tmp_path / "bloom")


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: pathlib.Path) -> None:
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    save_model(tmp_path / "bert", config)
    with pytest.raises(ConfigError, match="asks its attention for attention to later tokens"):
        probe_with_limit(tmp_path / "bert")


def test_a_model_that_drops_our_arguments_is_refused(tmp_path: pathlib.Path) -> None:
    sizes = {key: getattr(llama_config(), key) for key in ("vocab_size", "hidden_size", "intermediate_size")}
    config = transformers.StableLmConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
    save_model(tmp_path / "stablelm", config)
    with pytest.raises(ConfigError, match="StableLmAttention does not pass on the keyword arguments"):
        probe_with_limit(tmp_path / "stablelm")


def probe_with_limit(directory: pathlib.Path) -> None:
    loaded = load_model(directory, "float32", max_model_len=64)
    model_probe.check_logits(loaded, model_probe.find_layers(loaded))


def test_rope_that_looks_at_the_length_of_a_chunk_is_refused(tmp_path: pathlib.Path) -> None:
    """Up to 64 tokens it is RoPE as any; a chunk that ends beyond is rotated otherwise than the chunks before it."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
    save_model(tmp_path / "dynamic", llama_config(rope_parameters=rope))
    load = load_model(tmp_path / "dynamic", "float32", max_model_len=64)
    model_probe.check_logits(load, model_probe.find_layers(load))
    with pytest.raises(ConfigError, match="other logits with the same text in two chunks"):
        probe(tmp_path / "dynamic")


def test_an_argument_that_attention_does_not_know_is_refused(pristine_model: pathlib.Path) -> None:
    recorder = model_probe.LayerRecorder()
    layer = torch.nn.Linear(1, 1)
    recorder.note(layer, None, {"dropout": 0.0, "use_cache": False, "position_ids": torch.zeros(1), "bias": None})
    assert recorder.problems == set()
    recorder.note(layer, None, {"dropout": 0.1, "alibi": torch.zeros(1)})
    recorder.note(layer, torch.zeros(1), {})
    assert recorder.problems == {"the argument 'dropout'", "the argument 'alibi'", "an attention mask of its own"}


def test_dropping_a_window_would_show(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with transformers' own attention sees a feature that ours would silently ignore."""
    sizes = llama_config().to_dict()
    keys = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
    config = transformers.MistralConfig(**{key: sizes[key] for key in keys}, num_key_value_heads=2, sliding_window=8)
    loaded = load_model(save_model(tmp_path / "mistral", config), "float32", max_model_len=64)
    layers = model_probe.find_layers(loaded)
    model_probe.check_logits(loaded, layers)
    attend = PagedContext.attend

    def attend_without_window(context: PagedContext, call: AttentionCall) -> torch.Tensor:
        return attend(context, dataclasses.replace(call, sliding_window=None))

    monkeypatch.setattr(PagedContext, "attend", attend_without_window)
    with pytest.raises(ConfigError, match="other logits with transformers' own attention"):
        model_probe.check_logits(loaded, layers)
