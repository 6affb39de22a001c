"""Whether a model can be cut over ranks, by the plan that transformers has for it."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from executor_svc.config import ExecutorConfig
from executor_svc.devices import create_device
from executor_svc.kv_cache import LayerShape
from executor_svc.parallel.sharding import Plan, choose_plan
from holdback.errors import ConfigError
from tests.executor.tiny_models import llama_config


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (llama_config(num_attention_heads=8, num_key_value_heads=4), 4),
        (transformers.Qwen3MoeConfig(num_attention_heads=4, num_key_value_heads=2), 2),
    ],
    ids=["llama", "qwen3-moe"],
)
def test_a_model_whose_heads_ranks_divide_is_cut_by_its_own_plan(config: Any, size: int) -> None:
    plan = choose_plan(config, size)
    assert plan == Plan({"tp_size": size}, "cut by heads", size)
    assert plan.share([LayerShape(4, 64), LayerShape(8, 32)]) == [LayerShape(4 // size, 64), LayerShape(8 // size, 32)]


@pytest.mark.parametrize(
    ("config", "size", "reason"),
    [
        (llama_config(), 4, "num_key_value_heads is 2, which 4 does not divide"),
        (llama_config(hidden_size=48, num_attention_heads=6), 4, "num_attention_heads is 6, which 4 does not divide"),
    ],
    ids=["fewer KV heads than ranks", "heads"],
)
def test_heads_that_ranks_do_not_divide_stay_whole_on_every_rank(config: Any, size: int, reason: str) -> None:
    plan = choose_plan(config, size)
    assert plan.attention == f"whole on every rank, for {reason}"
    rules = {f"model.layers.*.self_attn.{name}_proj": "replicate" for name in "qkvo"}
    assert plan.arguments == {"tp_size": size, "tp_plan": rules}
    assert plan.share([LayerShape(2, 8)]) == [LayerShape(2, 8)]


def test_fused_projections_stay_whole_whatever_the_heads() -> None:
    plan = choose_plan(transformers.Phi3Config(num_attention_heads=3, num_key_value_heads=3), 2)
    assert plan == Plan({"tp_size": 2}, "whole on every rank, for the plan gathers its projections")


def test_a_model_whose_plan_covers_no_layer_has_its_experts_shared_out() -> None:
    plan = choose_plan(transformers.GptOssConfig(num_local_experts=4), 2)
    assert plan.arguments == {"tp_size": 2, "ep_size": 2}
    with pytest.raises(ConfigError, match="size is 3, but the model has 4 experts; allowed: a number that divides it"):
        choose_plan(transformers.GptOssConfig(num_local_experts=4), 3)


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="but transformers has no plan to cut a gpt2; allowed: 1"):
        choose_plan(transformers.GPT2Config(), 2)


def test_a_device_whose_models_cannot_be_cut_refuses_ranks_before_it_starts_any() -> None:
    settings: dict[str, Any] = {"scheduler": "127.0.0.1:1", "device": "simulated", "tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2; allowed on the device simulated: 1"):
        create_device(ExecutorConfig(**settings))
