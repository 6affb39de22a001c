"""The compiled step of a model that is cut over two ranks, on this machine's processor: its graphs and its tokens."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd

from executor_svc.devices.base import GraphKey, StepInputs
from executor_svc.devices.compiled import CompiledDevice
from executor_svc.parallel.group import RankGroup
from holdback.types import Phase
from tests.executor.compiled_models import build_compiled, is_getitem
from tests.executor.model_families import save_family
from tests.executor.rank_steps import PROMPT, group_of_two
from tests.executor.tiny_models import ALL_LOGPROBS, decode_step, llama_config, prefill_step, save_model

pytestmark = pytest.mark.loopback

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONTEXT = 64
COLLECTIVES = {
    "_c10d_functional.all_reduce.default",
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.wait_tensor.default",
}
# A constant of the embedding that is cut by the vocabulary, put into the graph as a copy: nothing is computed.
CONSTANT = "aten.lift_fresh_copy.default"


class RecordingBackend:
    """Runs what AOTAutograd makes of a graph with the core ATen decompositions.

    Attributes:
        foreign: operations that are not core ATen, by name.
        dynamic: nodes with a shape that is no number, or that are such a number.
    """

    def __init__(self) -> None:
        self.foreign: set[str] = set()
        self.dynamic: set[str] = set()
        self._backend = aot_autograd(fw_compiler=self._look, decompositions=core_aten_decompositions())

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = self._backend(graph, inputs)
        return compiled

    def _look(self, graph: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
            shapes = [value.shape for value in values if isinstance(value, torch.Tensor)]
            if not all(isinstance(size, int) for shape in shapes for size in shape):
                self.dynamic.add(str(node))
            if any(isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) for value in values):
                self.dynamic.add(str(node))
            is_operation = node.op == "call_function" and not is_getitem(node)
            if is_operation and torch.Tag.core not in getattr(node.target, "tags", ()):
                self.foreign.add(str(node.target))
        return graph.forward


def run_steps(directory: pathlib.Path, backend: Callable[..., Any], ranks: RankGroup | None) -> list[int]:
    """The tokens of a prompt and of three decodes: two graphs."""
    buckets: dict[str, Any] = {"prefill_buckets": (16,), "seqs_buckets": (2,), "context_buckets": (CONTEXT,)}
    device: Any = build_compiled(directory, backend, ranks=ranks, **buckets)
    assert isinstance(device, CompiledDevice)
    table = [5, 9, 2, 30, 11]
    steps = [_with_context(prefill_step(device, PROMPT, table), 0)]
    for number in range(3):
        step = decode_step(device, [len(PROMPT) + number], [table], [0], [ALL_LOGPROBS], num_outputs=[number + 1])
        steps.append(_with_context(step, CONTEXT))
    tokens = [int(device.collect(device.launch(step)).token_ids[0]) for step in steps]
    device.close()
    return tokens


def _with_context(step: StepInputs, context: int) -> StepInputs:
    step.key = GraphKey(Phase(step.key.phase), step.key.size, context)
    return step


def save_llama(directory: pathlib.Path) -> pathlib.Path:
    return save_model(directory, llama_config(num_hidden_layers=1))


def save_experts(family: str) -> Callable[[pathlib.Path], pathlib.Path]:
    changes: dict[str, Any] = {"num_hidden_layers": 1} | (
        {"layer_types": ["full_attention"]} if family == "gpt-oss" else {}
    )
    return partial(save_family, family=family, **changes)


# torch itself makes an object of a function of transformers that it traces.
@pytest.mark.filterwarnings(r"ignore:.*autograd\.function\.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "save",
    [
        save_llama,
        pytest.param(save_experts("qwen3-moe"), marks=pytest.mark.compiled),
        pytest.param(save_experts("gpt-oss"), marks=pytest.mark.compiled),
    ],
    ids=["llama", "qwen3-moe", "gpt-oss"],
)
def test_the_step_is_whole_and_static_with_functional_collectives_and_has_the_tokens_of_the_whole_model(
    tmp_path: pathlib.Path, save: Callable[[pathlib.Path], pathlib.Path]
) -> None:
    directory, meeting_file = save(tmp_path / "model"), tmp_path / "meeting"
    command = [sys.executable, "-m", "tests.executor.test_parallel_compiled", str(meeting_file), str(directory)]
    backend = RecordingBackend()
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        with group_of_two(0, meeting_file) as group:
            found = run_steps(directory, backend, group)
        output, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert backend.dynamic == set()
    assert backend.foreign - {CONSTANT} == COLLECTIVES
    assert found == run_steps(directory, RecordingBackend(), None)
    # Each rank sampled for itself, from logits that were gathered: nothing is told from one to the other.
    assert output.splitlines()[-1].split() == [str(token) for token in found]


if __name__ == "__main__":
    with group_of_two(1, pathlib.Path(sys.argv[1])) as own_group:
        print(*run_steps(pathlib.Path(sys.argv[2]), RecordingBackend(), own_group))
