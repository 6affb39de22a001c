"""The probe at load: what passes, and what is refused with its reason before it can give wrong tokens."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from executor_svc import model_probe
from executor_svc.attention import AttentionCall, PagedContext
from executor_svc.models import LoadedModel, load_model
from holdback.errors import ConfigError
from tests.executor.model_families import FAMILIES, save_family
from tests.executor.tiny_models import VOCAB_SIZE, llama_config, save_model

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = ["float32", "bfloat16", "float16"]
SMALL: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 32}
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.fixture(scope="module")
def pristine_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def probe(loaded: LoadedModel) -> None:
    model_probe.check_logits(loaded, model_probe.find_layers(loaded))


def assert_refused(directory: pathlib.Path, message: str, dtype: str = "float32") -> None:
    """By its configuration, while it is loaded, or by the probe."""
    with pytest.raises(ConfigError, match=message) as error:
        probe(load_model(directory, dtype, max_model_len=64))
    assert "\n" not in error.value.message


# What passes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_in_every_dtype(family: str, dtype: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.getbasetemp() / f"probed-{family}"
    if not directory.exists():
        save_family(directory, family)
    probe(load_model(directory, dtype))


def test_the_probe_finds_what_each_layer_keeps(pristine_model: pathlib.Path) -> None:
    layers = model_probe.find_layers(load_model(pristine_model, "float32"))
    assert [(layer.num_kv_heads, layer.head_dim) for layer in layers] == [(2, 8), (2, 8)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_probe_leaves_weights_as_they_were(pristine_model: pathlib.Path, dtype: str) -> None:
    loaded = load_model(pristine_model, dtype)
    before = dict(loaded.module.named_parameters())
    probe(loaded)
    after = dict(loaded.module.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in loaded.module.modules())


# Architectures


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(
            lambda: transformers.BloomConfig(**SMALL, n_layer=2, n_head=4),
            "has 2 layers and 0 attention calls; allowed: one of each layer",
            id="bloom",
        ),
        pytest.param(
            lambda: transformers.Mamba2Config(
                **SMALL, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=8
            ),
            "a Mamba2ForCausalLM, which .*(keyword argument 'holdback'|0 attention calls)",
            id="mamba2",
        ),
        pytest.param(
            lambda: transformers.Qwen3NextConfig(
                **(SMALL | LAYERS),
                num_key_value_heads=2,
                head_dim=8,
                layer_types=["linear_attention", "full_attention"],
                linear_num_key_heads=2,
                linear_num_value_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
            ),
            "has 2 layers and 1 attention calls; allowed: one of each layer",
            id="qwen3-next",
        ),
        pytest.param(
            lambda: transformers.FalconConfig(**SMALL, num_hidden_layers=2, num_attention_heads=4, alibi=False),
            "is a model whose attention cannot be replaced by paged attention",
            id="falcon",
        ),
        pytest.param(
            lambda: transformers.MptConfig(vocab_size=VOCAB_SIZE, d_model=32, n_heads=4, n_layers=2, max_seq_len=64),
            "a MptForCausalLM, which ",
            id="mpt",
        ),
        pytest.param(
            lambda: transformers.DeepseekV3Config(
                **(SMALL | LAYERS),
                num_key_value_heads=4,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_nope_head_dim=8,
                qk_rope_head_dim=8,
                v_head_dim=8,
                first_k_dense_replace=2,
            ),
            "asks its attention for keys and values of different sizes",
            id="deepseek-v3",
        ),
        pytest.param(
            lambda: transformers.BertConfig(**(SMALL | LAYERS)),
            "asks its attention for attention to later tokens",
            id="bert",
        ),
        pytest.param(
            lambda: transformers.StableLmConfig(**(SMALL | LAYERS), num_key_value_heads=4),
            "StableLmAttention does not pass on the keyword arguments",
            id="stablelm",
        ),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_architecture_that_cannot_work_is_refused(
    config: Any, message: str, dtype: str, tmp_path: pathlib.Path
) -> None:
    assert_refused(save_model(tmp_path / "model", config()), message, dtype)


def test_an_encoder_with_a_decoder_is_refused(tmp_path: pathlib.Path) -> None:
    config = transformers.T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    assert_refused(tmp_path / "t5", "has an encoder beside its decoder; allowed: decoder-only models")


@pytest.mark.parametrize("error", [ZeroDivisionError("by zero"), AssertionError(), NotImplementedError("two\nlines")])
def test_whatever_a_model_raises_is_a_refusal_in_one_sentence(
    error: Exception, pristine_model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(pristine_model, "float32")
    layers = model_probe.find_layers(loaded)

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(loaded.module.lm_head, "forward", fail)
    message = rf"which cannot run with paged attention: {type(error).__name__}.*; it cannot be served correctly"
    for check in (lambda: model_probe.find_layers(loaded), lambda: model_probe.check_logits(loaded, layers)):
        with pytest.raises(ConfigError, match=message) as refused:
            check()
        assert "\n" not in refused.value.message


# Rotary positions that depend on the length of a text

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 3.0, 6.0, 12.0],
    "original_max_position_embeddings": 64,
}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}


def save_with_rope(directory: pathlib.Path, kind: str) -> pathlib.Path:
    """Trained on 64 tokens, stretched to 512."""
    if kind == "dynamic":
        rope = DYNAMIC_ROPE | {"original_max_position_embeddings": 64}
        return save_model(directory, llama_config(rope_parameters=rope))
    sizes = SMALL | LAYERS | {"num_key_value_heads": 2, "initializer_range": 0.4, "pad_token_id": 0, "eos_token_id": 2}
    config = transformers.Phi3Config(
        **sizes, max_position_embeddings=512, original_max_position_embeddings=64, rope_parameters=LONG_ROPE
    )
    return save_model(directory, config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotation_that_changes_with_the_length_is_refused_beyond_the_trained_length(
    kind: str, dtype: str, tmp_path: pathlib.Path
) -> None:
    directory = save_with_rope(tmp_path / "model", kind)
    message = rf"max_model_len is 512, and a model of rope_type '{kind}' .* allowed: \[2, 64\]"
    with pytest.raises(ConfigError, match=message):
        load_model(directory, dtype)
    probe(load_model(directory, dtype, max_model_len=64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_the_probe_would_see_such_a_rotation_too(kind: str, dtype: str, tmp_path: pathlib.Path) -> None:
    """As of a model whose configuration says it in other words."""
    loaded = load_model(save_with_rope(tmp_path / "model", kind), dtype, max_model_len=64)
    stretched = dataclasses.replace(loaded, info=dataclasses.replace(loaded.info, max_model_len=512))
    with pytest.raises(ConfigError, match="other logits with the same text in two chunks"):
        probe(stretched)


# What the probe sees


def test_an_argument_that_attention_does_not_know_is_refused(pristine_model: pathlib.Path) -> None:
    recorder = model_probe.LayerRecorder()
    layer = torch.nn.Linear(1, 1)
    recorder.note(layer, None, {"dropout": 0.0, "use_cache": False, "position_ids": torch.zeros(1), "bias": None})
    assert recorder.problems == set()
    recorder.note(layer, None, {"dropout": 0.1, "alibi": torch.zeros(1)})
    recorder.note(layer, torch.zeros(1), {})
    assert recorder.problems == {"the argument 'dropout'", "the argument 'alibi'", "an attention mask of its own"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "change"),
    [("mistral", {"sliding_window": None}), ("gemma2", {"softcap": None}), ("gpt-oss", {"sinks": None})],
)
def test_the_probe_sees_what_attention_would_ignore(
    family: str, change: dict[str, Any], dtype: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(save_family(tmp_path / family, family), dtype)
    layers = model_probe.find_layers(loaded)
    attend = PagedContext.attend

    def ignore(context: PagedContext, call: AttentionCall) -> torch.Tensor:
        return attend(context, dataclasses.replace(call, **change))

    monkeypatch.setattr(PagedContext, "attend", ignore)
    with pytest.raises(ConfigError, match="other logits with transformers' own attention"):
        model_probe.check_logits(loaded, layers)


def test_numbers_that_a_dtype_cannot_hold_on_the_way_are_refused(tmp_path: pathlib.Path) -> None:
    """Weights that float16 holds, whose products it does not."""
    directory = save_model(tmp_path / "large")
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    for name in ("gate_proj", "up_proj"):
        weights[f"model.layers.0.mlp.{name}.weight"] *= 1000
    safetensors.torch.save_file(weights, directory / "model.safetensors", {"format": "pt"})
    probe(load_model(directory, "float32"))
    assert_refused(
        directory, "gives other logits with torch.float16 in place of float32: they differ by nan", "float16"
    )
