"""A tiny random checkpoint of each family of models that is served, made so that nothing of it can be left out unseen.

Windows are shorter than the texts of the tests, biases and sinks are not zero, norms not one, and weights are large
enough for the logits to depend on every token that is seen.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

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
