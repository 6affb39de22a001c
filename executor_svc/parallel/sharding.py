"""Whether and how a model can be cut over ranks, which its own plan in transformers decides.

Where the plan cuts the key projections by heads, each rank keeps its own KV heads and their memory. Where it gathers
them again (fused projections, as of Phi-3) every rank keeps all. A model whose plan covers no layer, but whose experts
can be shared out whole (gpt-oss), has its experts shared out and everything else on each rank.
"""

from __future__ import annotations

from typing import Any

from holdback.errors import ConfigError


def choose_plan(config: Any, size: int) -> dict[str, int]:
    """Arguments of transformers' `DistributedConfig`.

    Args:
        config: of the model, as transformers parsed it.
        size: number of ranks.

    Raises:
        ConfigError: there is no plan, or it does not divide the model evenly.
    """
    text = config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if any(name.startswith("layers.") for name in plan):
        if _cuts_heads(plan):
            for name in ("num_attention_heads", "num_key_value_heads"):
                _check_divides(text, name, size)
        return {"tp_size": size}
    if getattr(text, "base_model_ep_plan", None):
        _check_divides(text, "num_experts", size)
        return {"tp_size": size, "ep_size": size}
    raise ConfigError(
        f"tensor_parallel_size is {size}, but transformers has no plan to cut a {text.model_type}; allowed: 1"
    )


def _cuts_heads(plan: dict[str, str]) -> bool:
    return any(name.endswith(".k_proj") and style == "colwise" for name, style in plan.items())


def _check_divides(text: Any, name: str, size: int) -> None:
    found = getattr(text, name, None)
    counts = found if isinstance(found, (list, tuple)) else [found]
    for count in counts:
        if count is not None and count % size:
            raise ConfigError(
                f"tensor_parallel_size is {size}, but the model has {name} {count}; allowed: a number that divides it"
            )
