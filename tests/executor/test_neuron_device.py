"""The neuron device without a NeuronCore: what it asks of settings, machine and environment, and the whole of it on a
device and with a backend that stand in for those of torch-neuronx.
"""

from __future__ import annotations

import os
import pathlib
import sys
import types
from typing import Any

import pytest
import torch
import transformers

from executor_svc.config import ExecutorConfig, build_limits
from executor_svc.devices import create_device, neuron
from executor_svc.devices.neuron_config import check_neuron_limits, name_cache, pin_cores, rank_environment
from executor_svc.graphs import warm_up
from executor_svc.kv_budget import DeviceMemory
from holdback.errors import ConfigError
from holdback.types import Phase
from tests.executor.compiled_models import CountingBackend
from tests.executor.tiny_models import llama_config, prefill_step, save_model, with_graph

pytestmark = pytest.mark.usefixtures("one_thread")

GIB = 1 << 30


def load(**settings: Any) -> ExecutorConfig:
    return ExecutorConfig(scheduler="localhost:1", device="neuron", **({"model": pathlib.Path("m")} | settings))


def limits_of(config: ExecutorConfig, max_model_len: int = 8192) -> Any:
    return build_limits(config, max_model_len=max_model_len, num_blocks=10_000)


# Shapes


def test_default_buckets_obey_the_constraints() -> None:
    limits = limits_of(load())
    assert limits.num_batched_tokens_buckets == (512, 1024, 2048)
    assert limits.num_seqs_buckets == (1, 2, 4, 8, 16, 32)
    assert limits.decode_context_length_buckets == (256, 512, 1024, 2048, 4096, 8192)
    check_neuron_limits(limits)


def test_max_model_len_is_added_to_the_context_buckets_that_are_given() -> None:
    assert limits_of(load(decode_context_length_buckets=(512,))).decode_context_length_buckets == (512, 8192)
    assert limits_of(load(decode_context_length_buckets=(512, 8192))).decode_context_length_buckets == (512, 8192)
    with pytest.raises(ConfigError, match="strictly ascending"):
        limits_of(load(decode_context_length_buckets=(16384,)))


@pytest.mark.parametrize(
    ("settings", "max_model_len", "message"),
    [
        ({"decode_context_length_buckets": (200,)}, 8192, "has 200; allowed on the device neuron: multiples of 128"),
        ({}, 8000, "max_model_len is 8000; allowed on the device neuron: multiples of 128"),
        ({"num_batched_tokens_buckets": (256, 512)}, 8192, r"has 256; allowed on the device neuron: \[512, 4096\]"),
        ({"max_num_batched_tokens": 8192}, 8192, r"has 8192; allowed on the device neuron: \[512, 4096\]"),
        ({}, 256, r"num_batched_tokens_buckets has 256; allowed on the device neuron: \[512, 4096\]"),
        ({"block_size": 48}, 8192, "block_size is 48; allowed on the device neuron: what divides each of .* is 512"),
    ],
)
def test_a_shape_that_the_device_cannot_take_is_refused(
    settings: dict[str, Any], max_model_len: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_neuron_limits(limits_of(load(**settings), max_model_len))


@pytest.mark.parametrize(
    "config",
    [
        transformers.BloomConfig(vocab_size=128, hidden_size=32, n_layer=1, n_head=4),
        transformers.Mamba2Config(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_heads=8, head_dim=8),
    ],
    ids=["Bloom", "Mamba2"],
)
def test_a_model_that_no_length_would_help_is_refused_for_its_attention(tmp_path: pathlib.Path, config: Any) -> None:
    """Neither has a length of its own, so that one would have to be set; it would be asked for in vain."""
    directory = save_model(tmp_path / "model", config)
    with pytest.raises(ConfigError, match=r"is a model whose attention cannot be replaced by paged attention$"):
        create_device(load(model=directory, compile_cache=tmp_path / "cache"))


# Cores and environment


def test_cores_are_named_to_the_runtime_where_nobody_did() -> None:
    environment: dict[str, str] = {}
    pin_cores(load(), environment)
    assert environment == {}
    pin_cores(load(neuron_cores="4-7"), environment)
    assert environment == {"NEURON_RT_VISIBLE_CORES": "4-7"}


def test_cores_that_are_no_list_are_refused_before_the_runtime_is_loaded() -> None:
    with pytest.raises(ConfigError, match="the cores '3-1' are no list such as 0-3 or 4,5"):
        pin_cores(load(neuron_cores="3-1"), {})


@pytest.mark.parametrize("name", ["NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"])
def test_cores_that_a_device_plugin_named_are_left_alone(name: str) -> None:
    environment = {name: "2"}
    pin_cores(load(), environment)
    assert environment == {name: "2"}
    with pytest.raises(ConfigError, match=f"neuron_cores is '0-3' and {name} is '2'; allowed: one of them"):
        pin_cores(load(neuron_cores="0-3"), environment)


def test_each_rank_gets_a_core_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEURON_RT_VISIBLE_CORES", raising=False)
    config = load(tensor_parallel_size=2)
    assert [rank_environment(config, rank)["NEURON_RT_VISIBLE_CORES"] for rank in range(2)] == ["0", "1"]
    config = load(tensor_parallel_size=2, neuron_cores="4-5,9")
    assert [rank_environment(config, rank)["NEURON_RT_VISIBLE_CORES"] for rank in range(2)] == ["4", "5"]
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "6,7")
    environment = rank_environment(load(tensor_parallel_size=2), 1)
    assert environment["NEURON_RT_VISIBLE_CORES"] == "7"
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["NEURON_RT_NUM_CORES"]) == ("1", "2", "1")


def test_fewer_cores_than_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3; allowed: at most 2, the cores in '0-1'"):
        rank_environment(load(tensor_parallel_size=3, neuron_cores="0-1"), 0)


def test_the_compile_cache_is_the_only_one() -> None:
    environment: dict[str, str] = {}
    folder = pathlib.Path("/cache/artifacts")
    name_cache(folder, environment)
    assert environment["TORCH_NEURONX_NEFF_CACHE_DIR"] == "/cache/artifacts/neff"
    assert environment["TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"] == "/cache/locks"
    name_cache(folder, environment)  # a second device of the same process
    with pytest.raises(ConfigError, match="TORCH_NEURONX_NEFF_CACHE_DIR is '/cache/artifacts/neff'; allowed: unset"):
        name_cache(pathlib.Path("/other"), environment)


def test_locks_of_a_cache_that_may_not_be_written_to_go_elsewhere() -> None:
    environment: dict[str, str] = {}
    name_cache(pathlib.Path("/cache/artifacts"), environment, is_read_only=True)
    locks = pathlib.Path(environment["TORCH_NEURONX_NEFF_LOCAL_CACHE_DIR"])
    assert locks.is_dir()
    assert not locks.is_relative_to("/cache")


# The runtime


def test_a_machine_without_torch_neuronx_is_refused_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^device is neuron, but torch_neuronx cannot be imported: [^\n]+$"):
        neuron.open_runtime()


class FakeRuntime(types.SimpleNamespace):
    """`torch.neuron` as `neuron.py` uses it."""

    def __init__(self, cores: int = 1, total: int = 24 * GIB, reserved: int = 3 * GIB) -> None:
        super().__init__(
            device_count=lambda: cores,
            synchronize=lambda: None,
            get_device_properties=lambda: types.SimpleNamespace(total_memory=total),
            memory_allocated=lambda: GIB,
            memory_reserved=lambda: reserved,
        )


def install(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    monkeypatch.setitem(sys.modules, "torch_neuronx", types.ModuleType("torch_neuronx"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: runtime)


def test_a_machine_without_a_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeRuntime(cores=0))
    with pytest.raises(ConfigError, match="this machine has no NeuronCore that this process may use"):
        neuron.open_runtime()
    install(monkeypatch, FakeRuntime(cores=1))
    neuron.open_runtime()


def test_the_placeholder_of_torch_neuronx_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of that name on PyPI can be imported, and makes no device known."""
    monkeypatch.setitem(sys.modules, "torch_neuronx", types.ModuleType("torch_neuronx"))
    with pytest.raises(ConfigError, match="torch_neuronx is not its native form or finds no runtime"):
        neuron.open_runtime()


def test_memory_is_what_the_runtime_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeRuntime())
    model: Any = types.SimpleNamespace(num_weight_bytes=32)
    assert neuron.measure_memory(load(), model) == DeviceMemory(24 * GIB, 3 * GIB, 32)
    assert neuron.measure_memory(load(neuron_memory_bytes=GIB), model).total == GIB
    install(monkeypatch, FakeRuntime(total=0))
    with pytest.raises(ConfigError, match="neuron_memory_bytes is not set"):
        neuron.measure_memory(load(), model)


# All of it


@pytest.mark.compiled
def test_the_device_serves_a_model_where_another_device_and_backend_stand_in(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CountingBackend()
    monkeypatch.setattr(neuron, "DEVICE", "cpu")
    monkeypatch.setattr(neuron, "BACKEND", backend)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    directory = save_model(tmp_path / "model", llama_config(max_position_embeddings=512))
    config = load(
        model=directory,
        dtype="float32",
        num_seqs_buckets=(2,),
        neuron_memory_bytes=4 * GIB,
        kv_memory_min_bytes=0,
        kv_memory_cap_fraction=0.0001,
        compile_cache=tmp_path / "cache",
    )
    device = create_device(config)
    try:
        assert device.kind == "neuron"
        assert device.limits.decode_context_length_buckets == (256, 512)
        # 4 GiB x 0.0001 of KV memory; a block keeps 2 x 16 tokens x 2 layers x 2 heads x 8 numbers of 4 bytes.
        assert device.limits.num_blocks == int(4 * GIB * 0.0001) // 4096 - 1
        warm_up(device)
        assert len(backend.graphs) == len(device.declared_graphs()) == 5
        assert device.compiled is not None
        assert (device.compiled.num_hits, device.compiled.num_misses) == (0, 5)
        assert os.environ["TORCH_NEURONX_NEFF_CACHE_DIR"].startswith(str(tmp_path / "cache"))
        step = with_graph(device, prefill_step(device, [5, 6, 7], [1], params=None))
        assert (step.key.phase, step.key.size, step.key.context) == (Phase.PREFILL, 512, 0)
        device.collect(device.launch(step))
        assert len(backend.graphs) == 5
    finally:
        device.close()
