"""Whether and how a model can be cut over ranks, which its own plan in transformers decides.

Where the plan cuts the key projections and ranks divide the heads, each rank keeps its own KV heads and their memory.
Where ranks do not divide them, or the plan gathers the projections again (fused ones, as of Phi-3), attention is whole
on every rank, which then keeps all KV heads. A model whose plan covers no layer, but whose experts can be shared out
whole (gpt-oss), has its experts shared out and everything else on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import transformers

from executor_svc.kv_cache import LayerShape
from holdback.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is cut.

    Attributes:
        arguments: of transformers' `DistributedConfig`.
        attention: how attention is, for people.
        num_shares: parts that the KV heads are cut into; 1 where each rank has all of them.
    """

    arguments: dict[str, Any]
    attention: str
    num_shares: int = 1

    def share(self, layers: Sequence[LayerShape]) -> list[LayerShape]:
        """What one rank keeps of a token, of what the whole model keeps."""
        return [LayerShape(layer.num_kv_heads // self.num_shares, layer.head_dim) for layer in layers]


def choose_plan(config: Any, size: int) -> Plan:
    """How ranks cut a model.

    Args:
        config: of the model, as transformers parsed it.
        size: number of ranks.

    Raises:
        ConfigError: there is no plan, or ranks do not divide what it shares out.
    """
    text = config.get_text_config(decoder=True)
    rules = getattr(text, "base_model_tp_plan", None) or {}
    if any(name.startswith("layers.") for name in rules):
        return _plan_layers(config, text, rules, size)
    if getattr(text, "base_model_ep_plan", None):
        if text.num_experts % size:
            found = f"tensor_parallel_size is {size}, but the model has {text.num_experts} experts"
            raise ConfigError(f"{found}; allowed: a number that divides it")
        return Plan({"tp_size": size, "ep_size": size}, "whole on every rank, for the plan is one of experts")
    raise ConfigError(
        f"tensor_parallel_size is {size}, but transformers has no plan to cut a {text.model_type}; allowed: 1"
    )


def _plan_layers(config: Any, text: Any, rules: dict[str, str], size: int) -> Plan:
    arguments: dict[str, Any] = {"tp_size": size}
    key_rule = next((name for name in rules if name.endswith(".k_proj")), None)
    if key_rule is None or rules[key_rule] != "colwise":
        return Plan(arguments, "whole on every rank, for the plan gathers its projections")
    uneven = _find_uneven_heads(text, size)
    if uneven is None:
        return Plan(arguments, "cut by heads", size)
    owner = key_rule.removesuffix("k_proj")
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    arguments["tp_plan"] = {
        f"{model_class.base_model_prefix}.{name}": "replicate" for name in rules if name.startswith(owner)
    }
    return Plan(arguments, f"whole on every rank, for {uneven}, which {size} does not divide")


def _find_uneven_heads(text: Any, size: int) -> str | None:
    for name in ("num_attention_heads", "num_key_value_heads"):
        found = getattr(text, name, None)
        for count in found if isinstance(found, (list, tuple)) else (found,):
            if count is not None and count % size:
                return f"{name} is {count}"
    return None
