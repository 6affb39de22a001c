"""A tiny random checkpoint of each family of models that is served, made so that nothing of it can be left out unseen.

Windows are shorter than the texts of the tests, biases and sinks are not zero, norms not one, and weights are large
enough for the logits to depend on every token that is seen.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch
import transformers

from tests.executor.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE

WINDOW = 6
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **parameters}


LLAMA3_ROPE = rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=MAX_MODEL_LEN // 4
)
GEMMA3_ROPES = {
    "sliding_attention": rope("default"),
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
}


def _make(config_class: Any, **settings: Any) -> Callable[..., Any]:
    return lambda **changes: config_class(**(SIZES | settings | changes))


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama3": _make(transformers.LlamaConfig, rope_parameters=LLAMA3_ROPE),
    "smollm2": _make(transformers.LlamaConfig, tie_word_embeddings=True),
    "llama-linear-rope": _make(transformers.LlamaConfig, rope_parameters=rope("linear", factor=4.0)),
    "llama-yarn-rope": _make(
        transformers.LlamaConfig,
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=MAX_MODEL_LEN // 4),
    ),
    "mistral": _make(transformers.MistralConfig, sliding_window=WINDOW),
    "qwen2": _make(transformers.Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": _make(transformers.Qwen3Config, use_sliding_window=True, sliding_window=WINDOW, layer_types=ALTERNATING),
    "gemma2": _make(
        transformers.Gemma2Config,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=3.0,
    ),
    "gemma3": _make(
        transformers.Gemma3TextConfig,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        query_pre_attn_scalar=8,
        rope_parameters=GEMMA3_ROPES,
    ),
    "phi3": _make(transformers.Phi3Config, sliding_window=WINDOW),
    "mixtral": _make(transformers.MixtralConfig, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": _make(transformers.Qwen2MoeConfig, **EXPERTS, shared_expert_intermediate_size=16),
    "qwen3-moe": _make(transformers.Qwen3MoeConfig, **EXPERTS, norm_topk_prob=True),
    "gpt-oss": _make(
        transformers.GptOssConfig,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=LLAMA3_ROPE,
    ),
}


def save_family(directory: pathlib.Path, family: str, **changes: Any) -> pathlib.Path:
    """Writes the family's checkpoint in Hugging Face layout; the same one every time. `changes` are of its config."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family](**changes))
    for _, weight in sorted(model.named_parameters()):
        if weight.dim() == 1:  # norms, biases and sinks, which start as ones or zeros
            weight.data += 0.3 * torch.randn(weight.shape)
    model.save_pretrained(directory)
    return directory


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The 16 numbers of 4 bits: sign, two bits of exponent, one of fraction."""


def save_packed(directory: pathlib.Path) -> dict[str, torch.Tensor]:
    """Writes gpt-oss with its experts as it is published, in MXFP4, and returns the numbers that they stand for."""
    save_family(directory, "gpt-oss", intermediate_size=32)
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    generator, unpacked = torch.Generator().manual_seed(0), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        exponents = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        pairs = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], dim=-1)  # the low half comes first
        numbers = pairs.flatten(3) * torch.exp2(exponents.float() - 127)[..., None]
        unpacked[name] = numbers.flatten(2).transpose(1, 2)
    safetensors.torch.save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return unpacked
