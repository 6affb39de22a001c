"""Compiled devices on tiny models, and test backends that look at what they are handed."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd

from executor_svc.devices.compiled import CompiledDevice, GraphSettings
from executor_svc.model_probe import find_layers
from executor_svc.models import load_model
from executor_svc.parallel.group import RankGroup
from holdback.types import ExecutorLimits
from tests.executor.tiny_models import BLOCK_SIZE, VOCAB_SIZE

CONTEXT_BUCKETS = (16, 64)


class CountingBackend:
    """Runs graphs as they were traced. Only what `torch.compile` hands over costs time, which is the most of it.

    Attributes:
        graphs: traced so far.
    """

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


class CoreAtenBackend:
    """What a compiler for a device is handed: graphs of core ATen operations, of which nothing is dynamic.

    Attributes:
        operations: of each graph, by name.
    """

    def __init__(self) -> None:
        self.operations: list[Counter[str]] = []
        self._backend = aot_autograd(fw_compiler=self._look, decompositions=core_aten_decompositions())

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = self._backend(graph, inputs)
        return compiled

    def _look(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.operations.append(check_graph(graph, inputs))
        return graph.forward


def check_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Counter[str]:
    """Counts operations. Raises AssertionError for a dynamic shape, or one that is not core ATen."""
    assert all(isinstance(value, torch.Tensor) for value in inputs), "an input is no tensor"
    names: Counter[str] = Counter()
    for node in graph.graph.nodes:
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
            if value is None:
                continue
            assert isinstance(value, torch.Tensor), f"{node} gives a {type(value).__name__}"
            assert all(isinstance(size, int) for size in value.shape), f"{node} has the shape {value.shape}"
        if node.op == "call_function" and not is_getitem(node):
            assert isinstance(node.target, torch._ops.OpOverload), f"{node.target} is no ATen operation"
            assert torch.Tag.core in node.target.tags, f"{node.target} is not core ATen"
            assert not depends_on_data(node), f"{node.target} depends on data"
            names[str(node.target)] += 1
        else:
            assert node.op in ("placeholder", "output", "get_attr", "call_function"), f"{node} is a {node.op}"
    return names


def depends_on_data(node: torch.fx.Node) -> bool:
    """Whether values decide about shapes. `index` does so only where it is given a mask."""
    if node.target is torch.ops.aten.index.Tensor:
        indices = torch.utils._pytree.tree_leaves(node.args[1])
        return any(index.meta["val"].dtype is torch.bool for index in indices if isinstance(index, torch.fx.Node))
    tags: list[torch.Tag] = getattr(node.target, "tags", [])
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def is_getitem(node: torch.fx.Node) -> bool:
    """Takes one of several results apart; no operation on the device."""
    return getattr(node.target, "__name__", "") == "getitem" and not isinstance(node.target, torch._ops.OpOverload)


def build_compiled(
    directory: pathlib.Path,
    backend: Callable[..., Any],
    *,
    dtype: str = "float32",
    prefill_buckets: Sequence[int] = (8, 16),
    seqs_buckets: Sequence[int] = (2, 4),
    context_buckets: Sequence[int] = CONTEXT_BUCKETS,
    num_blocks: int = 32,
    ranks: RankGroup | None = None,
) -> CompiledDevice:
    """The compiled step on this machine's processor, with the limits of `tiny_models.build_device`."""
    model = load_model(directory, dtype, ranks=ranks)
    limits = ExecutorLimits(
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_num_seqs=seqs_buckets[-1],
        max_num_batched_tokens=prefill_buckets[-1],
        num_batched_tokens_buckets=tuple(prefill_buckets),
        num_seqs_buckets=tuple(seqs_buckets),
        decode_context_length_buckets=tuple(context_buckets),
    )
    settings = GraphSettings(torch.device("cpu"), backend, max_logprobs=VOCAB_SIZE)
    return CompiledDevice(model, find_layers(model), limits, settings)
