"""Whether a model can be cut over ranks, by the plan that transformers has for it."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from executor_svc.config import ExecutorConfig
from executor_svc.parallel.sharding import choose_plan
from holdback.errors import ConfigError
from tests.executor.tiny_models import llama_config


@pytest.mark.parametrize(
    ("config", "size", "expected"),
    [
        (llama_config(num_attention_heads=8, num_key_value_heads=4), 4, {"tp_size": 4}),
        (transformers.Qwen3MoeConfig(num_attention_heads=4, num_key_value_heads=2), 2, {"tp_size": 2}),
        # Its projections are fused, so their results are gathered and every rank keeps all KV heads.
        (transformers.Phi3Config(num_attention_heads=3, num_key_value_heads=3), 2, {"tp_size": 2}),
        # Its plan covers no layer, but its experts can be shared out whole.
        (transformers.GptOssConfig(num_local_experts=4), 2, {"tp_size": 2, "ep_size": 2}),
    ],
    ids=lambda value: value.model_type if hasattr(value, "model_type") else None,
)
def test_a_model_is_cut_by_its_own_plan(config: Any, size: int, expected: dict[str, int]) -> None:
    assert choose_plan(config, size) == expected


@pytest.mark.parametrize(
    ("config", "size", "name", "count"),
    [
        (llama_config(), 4, "num_key_value_heads", 2),
        (llama_config(hidden_size=48, num_attention_heads=6, num_key_value_heads=6), 4, "num_attention_heads", 6),
        (transformers.GptOssConfig(num_local_experts=4), 3, "num_experts", 4),
    ],
    ids=["fewer KV heads than ranks", "heads", "experts"],
)
def test_numbers_that_ranks_do_not_divide_are_refused(config: Any, size: int, name: str, count: int) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_plan(config, size)
    assert str(caught.value) == (
        f"tensor_parallel_size is {size}, but the model has {name} {count}; allowed: a number that divides it"
    )


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="but transformers has no plan to cut a gpt2; allowed: 1"):
        choose_plan(transformers.GPT2Config(), 2)


def test_the_simulated_device_has_no_ranks() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2; allowed on the device simulated: 1"):
        ExecutorConfig.load(
            ["--scheduler", "127.0.0.1:1", "--device", "simulated", "--tensor-parallel-size", "2"], environment={}
        )
