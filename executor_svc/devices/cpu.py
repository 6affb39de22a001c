"""The `cpu` device: a model of transformers on this machine's processors, with PyTorch, eagerly.

One thread of its own does everything that touches weights, KV memory, counts and `last_token`, strictly in the order
of the calls. So `launch` returns at once, the next step can be launched while one runs, and a request that starts in a
slot finds that whatever the step before does to that slot is done.

The length of the context is data here: one graph is declared per prefill bucket and per decode batch, with the context
`max_model_len`, and a step takes as long as its longest context asks for.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import structlog
import torch

from executor_svc.attention import PagedContext
from executor_svc.config import ExecutorConfig, build_limits
from executor_svc.devices.base import Device, SamplingInputs, StepInputs, StepResult
from executor_svc.devices.shapes import check_shapes
from executor_svc.devices.worker import OrderedWorker
from executor_svc.fast_model import is_fused, rewrite
from executor_svc.kernels import NativeKernels, load_kernels
from executor_svc.kv_budget import KVMemorySettings, KVShape, choose_num_blocks
from executor_svc.kv_cache import KVCache, block_bytes
from executor_svc.machine_memory import measure_machine_memory
from executor_svc.model_probe import check_logits, find_layers
from executor_svc.models import LoadedModel, load_model
from executor_svc.processors import default_num_threads
from executor_svc.sampler import Sampler
from holdback.errors import ConfigError
from holdback.types import Phase, RequestSpec

if TYPE_CHECKING:
    from executor_svc.parallel.group import RankGroup

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step on its way to the device's thread: what `StepInputs` held, copied into tensors of its own.

    Attributes:
        input_ids: int64 [1, T] of a prefill, whose T tokens are all real; None in a decode.
        positions: int64 [1, T] or [B, 1], where B is the real rows, or two.
        context: what attention needs.
        slots: int64 [1] or [B].
        num_rows: rows that may sample: 1, or the real rows of a decode.
        keep: index of the token of a prefill whose logits are wanted, or of none; None in a decode.
        sampling: as in `StepInputs`.
    """

    input_ids: torch.Tensor | None
    positions: torch.Tensor
    context: PagedContext
    slots: torch.Tensor
    num_rows: int
    keep: torch.Tensor | None
    sampling: SamplingInputs | None


class CpuDevice(Device):
    """A model in this process.

    Args:
        config: which model, and how to run it.
        ranks: those that share the model with this process; None when it has all of it.

    Raises:
        ConfigError: the directory is no model that can be served, or a setting does not fit it (decisions K1, K2).
    """

    kind = "cpu"

    def __init__(self, config: ExecutorConfig, ranks: RankGroup | None = None) -> None:
        if config.model is None:
            raise ConfigError("model is required by the device cpu")
        num_threads = config.num_threads if ranks is None else ranks.num_threads(config.num_threads)
        num_threads = num_threads or default_num_threads()
        torch.set_num_threads(num_threads)
        self._model = load_model(config.model, config.dtype, config.max_model_len, ranks)
        self.model = self._model.info
        weights = self._model.num_weight_bytes
        self.num_weight_bytes = weights
        layers = find_layers(self._model)
        self._kernels, self.kernels = _load_kernels(config, num_threads, ranks)
        self.compiled = None if self._kernels is None else self._kernels.compiled
        check_logits(self._model, layers, None if self._kernels is None else self._rewrite)
        self.kernels += f"; threads: {num_threads}"
        log.info("kernels", kernels=self.kernels)
        dtype = self._model.module.dtype
        bytes_per_block = block_bytes(layers, config.block_size, dtype)
        num_blocks = _choose_num_blocks(config, bytes_per_block, self.model.max_model_len, weights, ranks)
        self.limits = build_limits(config, max_model_len=self.model.max_model_len, num_blocks=num_blocks)
        # PyTorch computes a matrix product of one row in another order than those of more, which 16 bits show.
        is_invariant = dtype is torch.float32 or is_fused(self._model.module)
        self._smallest_batch = 1 if is_invariant else 2
        self._graphs = frozenset(self.declared_graphs())
        self.kv_cache = KVCache(layers, num_blocks, config.block_size, dtype)
        make_sampler = Sampler if ranks is None else ranks.sampler
        fast = () if self._kernels is None else (self._kernels.rank, self._kernels.draw)
        self._sampler = make_sampler(self.limits.max_num_seqs, self.model.vocab_size, self.model.eos_token_ids, *fast)
        self._last_token = torch.zeros(self.limits.max_num_seqs + 1, dtype=torch.long)
        self._worker = OrderedWorker("cpu-device")
        # Fused layers leave little to PyTorch, and where it shares that out it waits for its threads: the cosines of 32
        # rows took 30 ms on a busy machine. The kernels have threads of their own.
        torch_threads = 1 if is_fused(self._model.module) else num_threads
        self._worker.submit(partial(torch.set_num_threads, torch_threads))
        self._starts: list[Future[None]] = []

    def _rewrite(self, model: LoadedModel) -> NativeKernels | None:
        if self._kernels is not None:
            self.kernels += f"; {rewrite(model.module, self._kernels)}"
        return self._kernels

    def start_request(self, slot: int, spec: RequestSpec) -> None:
        """As the interface says. What is wrong with the request is raised by `collect` of the next launched step."""
        self._starts.append(self._worker.submit(partial(self._sampler.start_request, slot, spec)))

    def launch(self, inputs: StepInputs) -> object:
        check_shapes(inputs, self._graphs, self.limits, self.model.max_model_len)
        starts, self._starts = self._starts, []
        return self._worker.submit(partial(self._run, self._take(inputs), starts))

    def collect(self, ticket: object) -> StepResult:
        if not isinstance(ticket, Future):
            raise TypeError(f"ticket is {type(ticket).__name__}; allowed: what launch returned")
        result: StepResult = ticket.result()
        return result

    def reset(self) -> None:
        self._starts = []
        self._worker.submit(self._reset).result()

    def close(self) -> None:
        self._worker.close()

    def _take(self, inputs: StepInputs) -> _Step:
        """Copies what the step needs, so that the caller may use its arrays again. Padding is left out: the number of
        tokens or rows is data on a CPU.
        """
        is_prefill = inputs.key.phase is Phase.PREFILL
        num_tokens = inputs.num_tokens
        size = num_tokens if is_prefill else max(num_tokens, self._smallest_batch)
        num_rows = 1 if is_prefill else size
        positions = _copied(inputs.positions, size, 0)
        context = PagedContext(
            cache=self.kv_cache,
            phase=inputs.key.phase,
            rows=self.kv_cache.rows_for(_copied(inputs.slot_mapping, size, -1)),
            block_tables=_copied(inputs.block_tables, num_rows, 0),
            context_lens=_copied(inputs.context_lens, num_rows, 0),
            longest_context=int(inputs.context_lens.max()),
            num_tokens=num_tokens,
            kernels=self._kernels,
        )
        wanted = [num_tokens - 1] if inputs.sampling is not None else []
        return _Step(
            input_ids=None if inputs.input_ids is None else _copied(inputs.input_ids, size, 0)[None],
            positions=positions[None] if is_prefill else positions[:, None],
            context=context,
            slots=_copied(inputs.slots, num_rows, self.limits.max_num_seqs),
            num_rows=1 if is_prefill else num_tokens,
            keep=torch.tensor(wanted, dtype=torch.long) if is_prefill else None,
            sampling=inputs.sampling,
        )

    @torch.inference_mode()
    def _run(self, step: _Step, starts: Sequence[Future[None]]) -> StepResult:
        for start in starts:
            start.result()
        started_ns = time.perf_counter_ns()
        input_ids = self._last_token[step.slots][:, None] if step.input_ids is None else step.input_ids
        logits = self._model.logits(input_ids, step.positions, step.context, step.keep)
        result = StepResult(np.zeros(0, np.int32))
        if step.sampling is not None:
            self._sample(step, step.sampling, logits, result)
        result.device_us = max(1, (time.perf_counter_ns() - started_ns) // 1000)
        return result

    def _sample(self, step: _Step, sampling: SamplingInputs, logits: torch.Tensor, result: StepResult) -> None:
        rows = step.num_rows
        sampled = self._sampler.sample(
            logits[:rows],
            sampling.params[:rows],
            sampling.num_outputs[:rows].tolist(),
            torch.from_numpy(sampling.uniform[:rows]),
            step.slots[:rows].tolist(),
        )
        self._last_token[step.slots[:rows]] = sampled.token_ids
        result.token_ids = sampled.token_ids.numpy().astype(np.int32)
        result.failed_rows = sampled.failed_rows
        result.logprobs = sampled.logprobs

    def _reset(self) -> None:
        self.kv_cache.reset()
        self._sampler.reset()
        self._last_token.zero_()


def _choose_num_blocks(
    config: ExecutorConfig, bytes_per_block: int, max_model_len: int, weights: int, ranks: RankGroup | None
) -> int:
    """The memory is this machine's; what other programs use of it counts as used, and what all ranks need as needed."""
    if ranks is not None and ranks.rank > 0:
        return ranks.agree(None)
    wanted = KVMemorySettings(
        num_blocks=config.num_blocks,
        kv_cache_bytes=config.kv_cache_bytes,
        fraction=config.kv_memory_fraction,
        cap_fraction=config.kv_memory_cap_fraction,
        min_bytes=config.kv_memory_min_bytes or 0,
    )
    shape = KVShape(bytes_per_block * (1 if ranks is None else ranks.size), config.block_size, max_model_len)
    num_blocks = choose_num_blocks(shape, wanted, replace(measure_machine_memory(), weights=weights))
    return num_blocks if ranks is None else ranks.agree(num_blocks)


def _copied(array: npt.NDArray[np.int32], size: int, filler: int) -> torch.Tensor:
    """An int64 tensor with the first `size` rows of `array`, and rows of `filler` where it has fewer."""
    padded = np.full((size, *array.shape[1:]), filler, np.int64)
    padded[: len(array)] = array[:size]
    return torch.from_numpy(padded)


def _load_kernels(
    config: ExecutorConfig, num_threads: int, ranks: RankGroup | None
) -> tuple[NativeKernels | None, str]:
    if ranks is not None:
        return None, f"PyTorch, for {ranks.size} ranks share each layer"
    if config.dtype != "bfloat16":
        return None, f"PyTorch, for the dtype is {config.dtype}"
    if not config.use_kernels:
        return None, "PyTorch, as the settings say"
    return load_kernels(
        _kernels_directory(config),
        num_threads,
        is_required=config.require_cached,
        must_build=config.compile_only,
    )


def _kernels_directory(config: ExecutorConfig) -> pathlib.Path | None:
    """The one named, else a folder in the compile cache if one is named."""
    if config.kernels_directory is not None:
        return config.kernels_directory
    return None if config.compile_cache is None else config.compile_cache / "kernels"
