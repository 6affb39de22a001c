"""The neuron device over two ranks, the second one a process of its own. This machine's processor and a backend of
the test's stand in for NeuronCores and their compiler.
"""

from __future__ import annotations

import json
import os
import pathlib
import queue
import signal
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

from executor_svc.config import ExecutorConfig
from executor_svc.devices import create_device, neuron
from executor_svc.devices.neuron_config import prepare_neuron_ranks
from executor_svc.devices.parallel import ParallelDevice
from executor_svc.graphs import warm_up
from holdback.errors import ConfigError, InternalError
from tests.executor.builders import run_overlapping
from tests.executor.neuron_ranks import MEMORY_BYTES, stand_ins
from tests.executor.tiny_models import VOCAB_SIZE, llama_config, prefill_step, save_model, with_graph

PROMPT = [20, 61, 22, 93, 24, 25, 116, 27, 28, 79, 30]
NAMED = {"NEURON_RT_VISIBLE_CORES": "4,6"}
in_processes = [pytest.mark.loopback, pytest.mark.compiled, pytest.mark.usefixtures("one_thread")]


def build_config(model: pathlib.Path, size: int = 2, **changes: Any) -> ExecutorConfig:
    """Three graphs: prefills of 512 with a context of 0 and of 512, decodes of 2."""
    settings: dict[str, Any] = {
        "scheduler": "127.0.0.1:1",
        "device": "neuron",
        "model": model,
        "dtype": "float32",
        "tensor_parallel_size": size,
        "block_size": 4,
        "num_seqs_buckets": (2,),
        "decode_context_length_buckets": (512,),
        "neuron_memory_bytes": MEMORY_BYTES,
        "kv_memory_min_bytes": 0,
        "kv_memory_cap_fraction": 0.0001,
        "compile_cache": model.parent / "cache",
    }
    return ExecutorConfig(**(settings | changes))


@dataclass
class Served:
    """What two ranks did, from their start to their end in order.

    Attributes:
        tokens: of `run_overlapping`.
        num_blocks: that they agreed on.
        num_kv_heads: that rank 0 keeps of each layer.
        num_graphs: that rank 0 traced.
        environment: rank 0's.
        other: the report of rank 1.
        cache: the compile cache that they filled.
    """

    model: pathlib.Path
    tokens: list[list[int]]
    num_blocks: int
    num_kv_heads: set[int]
    num_graphs: int
    environment: dict[str, str]
    other: dict[str, Any]
    cache: pathlib.Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("ranks")
    model = save_model(folder / "model", llama_config(max_position_embeddings=512, num_hidden_layers=1))
    report = folder / "report.json"
    with stand_ins(report, NAMED):
        device: Any = create_device(build_config(model))
        assert isinstance(device, ParallelDevice)
        warm_up(device, is_timed=False)
        tokens = run_overlapping(device, PROMPT, 512, 512)
        local: Any = device._local
        backend: Any = neuron.BACKEND
        heads = {pages.shape[2] for pages in [*local.kv_cache.keys, *local.kv_cache.values]}
        environment = dict(os.environ)
        device.close()
    other = json.loads(report.read_text(encoding="utf-8"))
    num_blocks = device.limits.num_blocks
    return Served(model, tokens, num_blocks, heads, len(backend.graphs), environment, other, folder / "cache")


@pytest.fixture
def two_ranks(served: Served, tmp_path: pathlib.Path) -> Iterator[tuple[Any, queue.Queue[int]]]:
    """Two more, whose end is told here and does not end the process."""
    with stand_ins(tmp_path / "report.json", NAMED):
        device: Any = create_device(build_config(served.model, require_cached=True))
        statuses: queue.Queue[int] = queue.Queue()
        device._ranks._end_process = statuses.put
        yield device, statuses
        device.close()


class TestTwoRanks:
    pytestmark = in_processes

    def test_they_have_the_tokens_of_one(self, served: Served, tmp_path: pathlib.Path) -> None:
        with stand_ins(tmp_path / "report.json"):
            whole = create_device(build_config(served.model, 1))
            assert whole.kind == "neuron"
            assert served.tokens == run_overlapping(whole, PROMPT, 512, 512)
            whole.close()

    def test_each_traces_every_declared_graph_once_and_none_while_it_serves(self, served: Served) -> None:
        assert served.num_graphs == served.other["num_graphs"] == 3
        assert served.other["status"] == 0

    def test_each_is_started_with_a_core_of_the_executor_and_its_place(self, served: Served) -> None:
        environments = (served.environment, served.other["environment"])
        names = ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES", "RANK", "LOCAL_RANK")
        assert [[each[name] for name in names] for each in environments] == [["4", "1", "0", "0"], ["6", "1", "1", "1"]]
        assert {each[name] for each in environments for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {"2"}
        assert {each["MASTER_ADDR"] for each in environments} == {"127.0.0.1"}

    def test_each_keeps_its_graphs_under_an_identity_of_its_own(self, served: Served) -> None:
        environments = (served.environment, served.other["environment"])
        for rank, environment in enumerate(environments):
            home = pathlib.Path(environment["TORCH_NEURONX_NEFF_CACHE_DIR"]).parents[1]
            assert home.parent == served.cache
            identity = json.loads((home / "identity.json").read_text(encoding="utf-8"))
            assert identity["settings"] == {"rank": rank, "tensor_parallel_size": 2}
            assert len(list((home / "graphs").iterdir())) == 3

    def test_kv_memory_is_that_of_the_rank_that_has_least(self, served: Served) -> None:
        # Rank 1 reports half of the memory. A block keeps 2 x 4 tokens x 1 of 2 heads x 8 numbers of 4 bytes.
        assert served.num_blocks == int(MEMORY_BYTES // 2 * 0.0001) // 256 - 1
        assert served.num_kv_heads == {1}

    def test_one_that_is_killed_in_a_step_ends_the_executor_with_3(
        self, two_ranks: tuple[Any, queue.Queue[int]]
    ) -> None:
        device, statuses = two_ranks
        pid = device._ranks._ranks[0].process.pid
        os.kill(pid, signal.SIGSTOP)
        ticket = device.launch(with_graph(device, prefill_step(device, PROMPT, [5, 9, 2], params=None)))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InternalError, match="a step failed among ranks"):
            device.collect(ticket)
        assert statuses.get(timeout=20) == 3

    def test_a_graph_that_one_lacks_where_all_must_be_there_ends_the_executor_with_2(
        self, served: Served, two_ranks: tuple[Any, queue.Queue[int]]
    ) -> None:
        device, statuses = two_ranks
        other = pathlib.Path(served.other["environment"]["TORCH_NEURONX_NEFF_CACHE_DIR"]).parents[1]
        (record,) = (other / "graphs").glob("prefill-512-0-*.json")
        kept = record.read_bytes()
        record.unlink()
        try:
            with pytest.raises(InternalError):
                warm_up(device, is_timed=False)
            assert statuses.get(timeout=20) == 2
            reason = device._ranks._ranks[0].describe()
            assert "the graph prefill of 512 tokens, context 0 is not in the compile cache" in reason
        finally:
            record.write_bytes(kept)

    def test_a_model_that_cannot_be_cut_is_refused_in_one_sentence(self, tmp_path: pathlib.Path) -> None:
        sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "n_positions": 512, "n_embd": 32, "n_layer": 1, "n_head": 4}
        model = save_model(tmp_path / "model", transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
        with (
            stand_ins(tmp_path / "report.json"),
            pytest.raises(ConfigError, match=r"transformers has no plan to cut a gpt2; allowed: 1$"),
        ):
            create_device(build_config(model))
        assert not torch.distributed.is_initialized()  # the process may begin anew


# What is known before a rank is started


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("NEURON_", "TORCH_NEURONX_"))}
    monkeypatch.setattr(os, "environ", own)
    return own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("model") / "model", llama_config(max_position_embeddings=512))


def test_cores_are_those_that_the_settings_name_or_the_first(model: pathlib.Path, environment: dict[str, str]) -> None:
    def cores(**settings: Any) -> list[str]:
        return [each["NEURON_RT_VISIBLE_CORES"] for each in prepare_neuron_ranks(build_config(model, **settings))]

    assert cores() == ["0", "1"]
    assert cores(neuron_cores="2-5") == ["2", "3"]
    environment |= NAMED
    assert cores() == ["4", "6"]
    with pytest.raises(ConfigError, match="neuron_cores is '2-5' and NEURON_RT_VISIBLE_CORES is '4,6'; allowed: one"):
        cores(neuron_cores="2-5")


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"NEURON_RT_VISIBLE_CORES": "4,4"}, "tensor_parallel_size is 2; allowed: at most 1, the cores in '4,4'"),
        ({"NEURON_RT_NUM_CORES": "2"}, "NEURON_RT_NUM_CORES is '2', which names no core; allowed: NEURON_RT_VISIBLE"),
        ({"TORCH_NEURONX_NEFF_CACHE_DIR": "/x"}, "TORCH_NEURONX_NEFF_CACHE_DIR is '/x'; allowed: unset"),
    ],
)
def test_an_environment_that_ranks_cannot_share_is_refused_before_one_is_started(
    model: pathlib.Path, environment: dict[str, str], named: dict[str, str], message: str
) -> None:
    environment |= named
    with pytest.raises(ConfigError, match=message):
        create_device(build_config(model))


def test_a_shape_that_the_device_cannot_take_is_refused_before_a_rank_is_started(
    model: pathlib.Path, environment: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match="block_size is 48; allowed on the device neuron: what divides each of"):
        create_device(build_config(model, block_size=48))
    assert "RANK" not in environment


def test_collectives_are_loaded_without_opening_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch-neuronx refuses to make its process group once the runtime is open, as it is when devices are counted."""
    monkeypatch.setitem(sys.modules, "torch_neuronx", types.ModuleType("torch_neuronx"))
    opened: list[str] = []
    monkeypatch.setattr(torch, "get_device_module", opened.append)
    assert neuron.load_neuron_collectives() == "cpu:gloo,neuron:neuron"
    assert opened == []
