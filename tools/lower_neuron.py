"""Lowers the graphs of the neuron device to StableHLO, the language that its compiler takes; no device is needed.

    .cache/lower-neuron/bin/python tools/lower_neuron.py [--all] [--text FOLDER]

Each graph is traced and taken apart into core ATen operations as `torch.compile` does it for a backend, and those are
lowered by torchax and jax. torch-neuronx lowers the same operations with a converter of its own, so what is shown is
that the graphs are whole, static and expressible; not that its converter or compiler takes them.

Models are random, in the shapes of a tiny Llama, a tiny mixture of experts, a tiny gpt-oss (windows and sinks) and of
SmolLM2-135M, and the tiny ones also cut over two ranks: this process is rank 0 of a group that only exists in name, for
nothing is computed. Of SmolLM2 and of what is cut, the smallest and the largest graph of each kind are lowered; `--all`
lowers every one.
"""

import argparse
import collections
import contextlib
import dataclasses
import importlib.util
import pathlib
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves

from executor_svc import attention
from executor_svc.compile_cache import describe_graph
from executor_svc.config import ExecutorConfig, build_limits
from executor_svc.devices.base import GraphKey
from executor_svc.devices.compiled import CompiledDevice, GraphSettings
from executor_svc.graphs import graph_inputs
from executor_svc.model_probe import find_layers
from executor_svc.models import LoadedModel, load_model
from executor_svc.parallel.group import RankGroup
from holdback.types import ExecutorLimits, ModelInfo

RANKS = "torch_dist"
"""Axis of jax that torchax lets collectives go over."""

NUM_RANKS = 2


class Recorder:
    """A backend that keeps the graph that it is handed, and computes nothing.

    Attributes:
        graph: the last one, of core ATen operations.
        inputs: of it, without data; in that of a rank the mesh too, for each weight that is cut, and nothing reads it.
    """

    def __init__(self) -> None:
        self.graph: torch.fx.GraphModule | None = None
        self.inputs: Sequence[Any] = ()
        self._backend = aot_autograd(fw_compiler=self._keep, decompositions=core_aten_decompositions())

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = self._backend(graph, inputs)
        return compiled

    def _keep(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graph, self.inputs = graph, inputs
        (nodes,) = graph.graph.output_node().args
        outputs = [node.meta["val"] for node in tree_leaves(nodes)]
        return lambda *_inputs: [torch.zeros(value.shape, dtype=value.dtype) for value in outputs]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """What a model is made of.

    Attributes:
        config: of transformers.
        settings: of the executor.
        num_ranks: that it is cut over.
    """

    config: Any
    settings: dict[str, Any]
    num_ranks: int = 1


def list_sources() -> dict[str, Source]:
    tiny: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    rope = {"rope_type": "default", "rope_theta": 150000.0}
    oss: dict[str, Any] = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "rope_parameters": rope,
    }
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 512}
    smollm2 = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    configs = {
        "Llama": transformers.LlamaConfig(**tiny),
        "Qwen3-MoE": transformers.Qwen3MoeConfig(**tiny, **experts),
        "gpt-oss": transformers.GptOssConfig(**tiny, **oss),
    }
    return {
        **{name: Source(config, small) for name, config in configs.items()},
        **{f"{name}, rank 0 of 2": Source(config, small, NUM_RANKS) for name, config in configs.items()},
        "SmolLM2-135M": Source(smollm2, {}),
    }


@contextlib.contextmanager
def open_device(name: str, source: Source, recorder: Recorder) -> Iterator[CompiledDevice]:
    with contextlib.ExitStack() as stack:
        model = build_model(name, source.config) if source.num_ranks == 1 else build_share(source, stack)
        limits, settings = choose_limits(model.info, source.settings), GraphSettings(torch.device("cpu"), recorder)
        device = CompiledDevice(model, find_layers(model), limits, settings)
        stack.callback(device.close)
        yield device


def build_model(name: str, config: Any) -> LoadedModel:
    attention.register()
    auto_class: Any = transformers.AutoModelForCausalLM
    module = auto_class.from_config(config, attn_implementation=attention.IMPLEMENTATION, dtype=torch.bfloat16)
    info = ModelInfo(name, name, config.vocab_size, (2,), config.max_position_embeddings)
    return LoadedModel(module.eval().requires_grad_(False), config.num_hidden_layers, info)


def build_share(source: Source, stack: contextlib.ExitStack) -> LoadedModel:
    """Rank 0's share, read from files as that of an executor is. The group is there until `stack` is closed."""
    import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known

    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    auto_class: Any = transformers.AutoModelForCausalLM
    auto_class.from_config(source.config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    group = RankGroup(0, source.num_ranks, folder / "meeting", "fake")
    stack.callback(group.close)
    return load_model(folder / "model", "bfloat16", ranks=group)


def choose_limits(info: ModelInfo, settings: dict[str, Any]) -> ExecutorLimits:
    """As the neuron device chooses them; KV memory for one request of full length."""
    executor = ExecutorConfig(scheduler="localhost:1", device="neuron", model=pathlib.Path("unused"), **settings)
    num_blocks = 1 + -(-info.max_model_len // executor.block_size)
    return build_limits(executor, max_model_len=info.max_model_len, num_blocks=num_blocks)


def choose_graphs(device: CompiledDevice, *, wants_all: bool, num_ranks: int) -> list[GraphKey]:
    """All, or of each phase the first and the last where there are many, or ranks."""
    graphs = device.declared_graphs()
    if wants_all or (len(graphs) <= 12 and num_ranks == 1):
        return graphs
    phases: dict[object, list[GraphKey]] = {}
    for key in graphs:
        phases.setdefault(key.phase, []).append(key)
    return [key for keys in phases.values() for key in (keys[0], keys[-1])]


def lower(graph: torch.fx.GraphModule, inputs: Sequence[Any], num_ranks: int) -> str:
    """StableHLO of a graph. Raises whatever torchax or jax raise for an operation that they lack."""
    import jax
    import torchax
    from torchax import interop

    environment = torchax.default_env()
    are_tensors = [isinstance(value, torch.Tensor) for value in inputs]
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten._to_copy.default:  # all is on one device, which torchax calls otherwise
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "device"}
    graph.recompile()

    def run(*arrays: Any) -> Any:
        left = iter(arrays)
        with environment:
            given = tuple(next(left) if is_tensor else None for is_tensor in are_tensors)
            return interop.jax_view(tuple(graph(*interop.torch_view(given))))

    if num_ranks > 1:
        every_rank = jax.sharding.PartitionSpec()
        mesh = jax.make_mesh((num_ranks,), (RANKS,))
        run = jax.shard_map(run, mesh=mesh, in_specs=every_rank, out_specs=every_rank, check_vma=False)
    to_jax = torchax.ops.mappings.t2j_dtype
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    shapes = [jax.ShapeDtypeStruct(tuple(value.shape), to_jax(value.dtype)) for value in tensors]
    return str(jax.jit(run, keep_unused=True).lower(*shapes).as_text())


def prepare_collectives() -> None:
    """Two devices in name, and a gathering that puts parts behind each other as torch's does; torchax stacks them."""
    import jax
    import torchax

    def gather(part: Any, _size: int, _group: str) -> Any:
        return jax.lax.all_gather(part, RANKS, tiled=True)

    jax.config.update("jax_num_cpu_devices", NUM_RANKS)
    operation = torch.ops._c10d_functional.all_gather_into_tensor.default
    torchax.ops.ops_registry.register_torch_dispatch_op(operation, gather)


def stand_in_for_gone_overloads() -> None:
    """torchax 0.0.13 names overloads with named dimensions, which torch 2.13 no longer has, when it is imported.

    Nothing calls them; a name in their place is enough.
    """
    found = importlib.util.find_spec("torchax")
    assert found is not None
    assert found.origin is not None
    for path in pathlib.Path(found.origin).parent.rglob("*.py"):
        for operation, overload in re.findall(r"torch\.ops\.aten\.(\w+)\.(\w+)", path.read_text(encoding="utf-8")):
            packet = getattr(torch.ops.aten, operation)
            if not hasattr(packet, overload):
                setattr(packet, overload, f"{operation}.{overload}")


def count_operations(text: str) -> collections.Counter[str]:
    return collections.Counter(re.findall(r"\b(?:stablehlo|chlo)\.\w+", text))


@dataclasses.dataclass(slots=True)
class Row:
    """Of the table: a graph on its way.

    Attributes:
        num_ranks: that the model is cut over.
        graph: as traced; None before, and once it is lowered.
        problem: what it failed with; empty when it did not.
    """

    model: str
    key: GraphKey
    num_ranks: int = 1
    graph: torch.fx.GraphModule | None = None
    inputs: Sequence[Any] = ()
    num_core: int = 0
    operations: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: float = 0.0
    problem: str = ""


@contextlib.contextmanager
def noting(row: Row, done: str) -> Iterator[None]:
    """Times what is done to a row, and keeps whatever it fails with: that is what the table is for."""
    started = time.perf_counter()
    try:
        yield
    except Exception as error:
        row.problem = f"{type(error).__name__}: {error}".splitlines()[0]
    row.seconds += time.perf_counter() - started
    print(f"{row.model} {describe_graph(row.key)}: {row.problem or done}", file=sys.stderr, flush=True)


def trace(row: Row, device: CompiledDevice, recorder: Recorder) -> None:
    with noting(row, "traced"):
        device.collect(device.launch(graph_inputs(device, row.key, row.key.context)))
        assert recorder.graph is not None
        row.graph, row.inputs = recorder.graph, recorder.inputs
        row.num_core = sum(node.op == "call_function" for node in row.graph.graph.nodes)


def lower_row(row: Row, folder: pathlib.Path | None) -> None:
    assert row.graph is not None
    with noting(row, "lowered"):
        text = lower(row.graph, row.inputs, row.num_ranks)
        row.operations = count_operations(text)
        if folder is not None:
            graph = f"{row.model}-{row.key.phase.value}-{row.key.size}-{row.key.context}.mlir"
            (folder / re.sub(r"[ ,]+", "-", graph)).write_text(text, encoding="utf-8")
    row.graph, row.inputs = None, ()


def print_table(rows: Sequence[Row]) -> None:
    print("| model | graph | core ATen | StableHLO | kinds | s |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        graph = f"{row.key.phase.value} {row.key.size}, context {row.key.context}"
        total = f"**{row.problem}**" if row.problem else row.operations.total()
        print(f"| {row.model} | {graph} | {row.num_core} | {total} | {len(row.operations)} | {row.seconds:.1f} |")
    everything = sum((row.operations for row in rows), collections.Counter[str]())
    print("\nOperations: " + ", ".join(f"{name} {count}" for name, count in everything.most_common()))


def main() -> int:
    warnings.filterwarnings("ignore", message="Explicitly requested dtype int64")  # jax has int32, as the device does
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every graph of every model")
    parser.add_argument("--model", help="only this one")
    parser.add_argument("--text", type=pathlib.Path, help="folder to write the StableHLO of each graph to")
    options = parser.parse_args()
    if options.text is not None:
        options.text.mkdir(parents=True, exist_ok=True)
    rows = trace_all(options.model, wants_all=options.all)
    # Only now: once torchax is imported, torch takes a device of its own for the default one.
    stand_in_for_gone_overloads()
    prepare_collectives()
    for row in rows:
        if not row.problem:
            lower_row(row, options.text)
    print_table(rows)
    return 1 if not rows or any(row.problem for row in rows) else 0


def trace_all(model: str | None, *, wants_all: bool) -> list[Row]:
    rows = []
    for name, source in list_sources().items():
        if model not in (None, name):
            continue
        recorder = Recorder()
        with open_device(name, source, recorder) as device:
            for key in choose_graphs(device, wants_all=wants_all, num_ranks=source.num_ranks):
                rows.append(Row(name, key, source.num_ranks))
                trace(rows[-1], device, recorder)
    return rows


if __name__ == "__main__":
    sys.exit(main())
