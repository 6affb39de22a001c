"""The chart refuses the shapes and the KV memory that an executor refuses when it starts, and no others."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from executor_svc.config import ExecutorConfig, build_limits
from executor_svc.devices.neuron_config import check_neuron_limits
from executor_svc.devices.simulated_config import create_simulated_device
from holdback.buckets import blocks_for
from holdback.errors import ConfigError
from tests.chart.rendering import refusal

NUM_CONFIGS = 60
"""For each device."""
LENGTHS_OF_MODELS = (2, 4, 100, 128, 256, 512, 600, 1024, 2000, 2048, 4096, 8192, 16384)
"""Where the values do not say it, the chart must take what some model can do."""

Config = dict[str, Any]

# Of each setting, and how often it is set.
SHAPES: dict[str, tuple[float, list[Any]]] = {
    "max_model_len": (0.75, [128, 256, 512, 1024, 2000, 2048, 8192]),
    "max_num_seqs": (0.4, [1, 4, 8, 16]),
    "max_num_batched_tokens": (0.4, [4, 128, 256, 512, 600, 1024, 2048, 4096, 8192]),
    "num_batched_tokens_buckets": (
        0.4,
        [[128], [512], [512, 2048], [1024, 2048], [2048], [600], [512, 128], [512, 4096], [8192], [4]],
    ),
    "num_seqs_buckets": (0.4, [[1], [1, 4], [4, 16], [1, 4, 8], [1, 1], [32]]),
    "decode_context_length_buckets": (0.3, [[128], [256, 512], [1024], [1024, 4096, 8192], [100], [16384], [256, 256]]),
    "block_size": (0.3, [1, 8, 16, 24, 32, 128, 1024]),
    "num_blocks": (0.2, [0, 1, 2, 9, 65, 126, 129, 130]),
    "kv_cache_bytes": (0.1, [10**10]),
    "kv_memory_fraction": (0.1, [0.5]),
    "kv_memory_cap_fraction": (0.1, [0.3]),
    "kv_memory_min_bytes": (0.1, [10**9]),
}
OF_SIMULATED: dict[str, tuple[float, list[Any]]] = {
    "simulated_vocab_size": (0.1, [64]),
    "simulated_eos_token_ids": (0.1, [[2], [63, 64], [32000], [-1]]),
    "simulated_nan_token_id": (0.1, [0, 64, 32000]),
}


def choose(device: str, chance: random.Random) -> Config:
    """Some settings of an executor."""
    # The device cpu takes no contexts at all, and simulated no bytes: they would be all that is ever found.
    left_out = {"cpu": ("decode_context",), "simulated": ("kv_",), "neuron": ()}[device]
    settings = SHAPES | (OF_SIMULATED if device == "simulated" else {})
    config = {
        name: chance.choice(values)
        for name, (share, values) in settings.items()
        if chance.random() < share and not (name.startswith(left_out) and chance.random() < 0.8)
    }
    if device == "neuron" and config.get("max_num_batched_tokens", 0) % 512 and "max_model_len" not in config:
        # Here a model of few tokens would do, and whether it would with these contexts the chart does not find out.
        config.pop("decode_context_length_buckets", None)
    return config


def check_start(device: str, config: Config) -> None:
    """What an executor checks before it loads anything. Raises ConfigError or ValueError."""
    model = None if device == "simulated" else "/models/m"
    parsed = ExecutorConfig.model_validate({"scheduler": "s:1", "device": device, "model": model, **config})
    if device == "simulated":
        create_simulated_device(parsed)
        return
    assert parsed.max_model_len is not None
    num_blocks = parsed.num_blocks
    if num_blocks is None:
        num_blocks = 1 + blocks_for(parsed.max_model_len, parsed.block_size)
    limits = build_limits(parsed, max_model_len=parsed.max_model_len, num_blocks=num_blocks)
    if device == "neuron":
        check_neuron_limits(limits)


def why_refused(device: str, config: Config) -> str | None:
    """The process's words for settings that it refuses with every model; None where it takes them with some."""
    lengths = LENGTHS_OF_MODELS if device != "simulated" and "max_model_len" not in config else (None,)
    words = None
    for length in lengths:
        try:
            check_start(device, config if length is None else config | {"max_model_len": length})
        except (ConfigError, ValueError) as error:
            words = str(error)
        else:
            return None
    return words


def refused_by_chart(device: str, configs: list[Config]) -> dict[int, str]:
    """Its words, by the place in `configs`. One run of Helm."""
    groups = [{"name": f"g{place}", "device": device, "config": config} for place, config in enumerate(configs)]
    pool: Config = {"name": "p", "servedModelNames": ["m"], "tokenizer": {"imagePath": "/t"}, "executors": groups}
    if device != "simulated":
        pool["model"] = {"imagePath": "/m"}
    words = refusal(json.dumps({"tls": {"enabled": False}, "pools": [pool]}))
    assert "don't meet the specifications" not in words, words
    return {int(place): sentence for place, sentence in re.findall(r"executors\[g(\d+)\]\.(.*?)(?= - |$)", words)}


@pytest.mark.parametrize("device", ["cpu", "neuron", "simulated"])
def test_the_chart_refuses_what_the_process_refuses_and_nothing_else(device):
    chance = random.Random(6)
    configs = [choose(device, chance) for _ in range(NUM_CONFIGS)]
    chart = refused_by_chart(device, configs)
    process = {place: words for place, config in enumerate(configs) if (words := why_refused(device, config))}
    differ = [(configs[place], chart.get(place), process.get(place)) for place in sorted(chart.keys() ^ process.keys())]
    assert differ == []
    assert NUM_CONFIGS / 5 < len(chart) < NUM_CONFIGS, "both kinds are there"
