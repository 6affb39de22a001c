"""What a model must show at load, because much that cannot work raises no error and only gives wrong tokens.

A few forwards of random ids tell: each layer calls the attention exactly once and passes nothing that it does not
know; its own attention of transformers gives the same logits; and so does the same text in two chunks and a decode
step, where everything that keeps a state of its own between tokens (linear attention, a convolution) or looks at the
length of a batch (dynamic RoPE) goes wrong. For the latter the second chunk is placed at the end of `max_model_len`.

These are compared in float32, whatever dtype the model runs in: rounding to 16 bits hides much that is wrong. What the
model gives in its own dtype, and with its layers rewritten, is then compared with that.

Not covered: what only shows in more than a few tokens, as a sliding window that attention would ignore. Tests compare
each family with transformers for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from executor_svc.attention import IMPLEMENTATION, AttentionCall, PagedContext
from executor_svc.kernels.native import NativeKernels
from executor_svc.kv_cache import KVCache, LayerShape
from executor_svc.model_directory import describe_error
from executor_svc.models import LoadedModel
from holdback.buckets import blocks_for
from holdback.errors import ConfigError
from holdback.types import Phase

_HARMLESS = frozenset({"position_ids", "use_cache", "output_attentions", "output_router_logits", "cache_position"})
_BLOCK_SIZE = 16
_NUM_TOKENS = 40
_FIRST_CHUNK = 24
# Of the reference's own spread; logits of another text differ by 1.4. In float32 SmolLM2-135M and tiny models differ by
# 1e-5 at most, wrong attention or a rotation by other angles by 1e-2 and more. Rounding moves SmolLM2-135M by 0.014 in
# float16 and by 0.2 in bfloat16, with its layers rewritten by 0.04.
_TOLERANCE = {torch.float32: 5e-4, torch.float16: 0.2, torch.bfloat16: 0.6}


class LayerRecorder:
    """An attention that computes nothing and records what its layers ask for.

    Attributes:
        shapes: of each layer that called, in the order of the first call.
        calls: how often each layer called.
        problems: what no paged attention can give.
    """

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.calls: dict[int, int] = {}
        self.problems: set[str] = set()

    def note(self, module: torch.nn.Module, attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
        if attention_mask is not None:
            self.problems.add("an attention mask of its own")
        if getattr(module, "is_causal", True) is False:
            self.problems.add("attention to later tokens")
        self.problems |= {
            f"the argument {name!r}"
            for name, value in others.items()
            if name not in _HARMLESS and value is not None and not (name == "dropout" and value == 0)
        }

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls[call.layer] = self.calls.get(call.layer, 0) + 1
        self.shapes[call.layer] = LayerShape(call.num_kv_heads, call.key.shape[-1])
        if call.key.shape != call.value.shape or call.query.shape[-1] != call.key.shape[-1]:
            self.problems.add("keys and values of different sizes")
        return call.query.new_zeros(*call.query.transpose(1, 2).shape[:3], call.value.shape[-1])


@torch.inference_mode()
def find_layers(model: LoadedModel) -> list[LayerShape]:
    """What each layer keeps in KV memory. Raises ConfigError for a model whose attention is not ours to compute."""
    recorder = LayerRecorder()
    with _refusing_what_it_raises(model):
        model.logits(torch.zeros(1, 2, dtype=torch.long), torch.arange(2)[None], recorder)
    if recorder.problems:
        raise _refuse(model, f"asks its attention for {', '.join(sorted(recorder.problems))}")
    if recorder.calls != dict.fromkeys(range(model.num_layers), 1):
        calls = sum(recorder.calls.values())
        raise _refuse(model, f"has {model.num_layers} layers and {calls} attention calls; allowed: one of each layer")
    return [recorder.shapes[layer] for layer in range(model.num_layers)]


@torch.inference_mode()
def check_logits(
    model: LoadedModel, layers: list[LayerShape], rewrite: Callable[[LoadedModel], NativeKernels | None] | None = None
) -> None:
    """Compares one chunk with transformers' own attention, and with two chunks and a decode step.

    Args:
        model: as loaded.
        layers: as `find_layers` gave them.
        rewrite: replaces parts of the model by faster ones, which must give the same logits too, and returns the
            kernels for its attention.

    Raises:
        ConfigError: they differ by more than rounding can explain.
    """
    num_tokens = min(_NUM_TOKENS, model.info.max_model_len)
    if num_tokens < 3:
        return  # too short for two chunks and a decode step
    ids = torch.randint(model.info.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    cut = min(_FIRST_CHUNK, num_tokens - 2)
    positions = torch.arange(num_tokens)
    positions[cut:] += model.info.max_model_len - num_tokens
    in_chunks = [cut, num_tokens - 1, num_tokens]
    with _refusing_what_it_raises(model), _in_float32(model.module):
        runner = _Runner(model, layers, torch.float32)
        exact = runner.in_chunks(ids, positions, [num_tokens])
        _compare(model, "transformers' own attention", exact, _own_logits(model, ids, positions), torch.float32)
        chunked = runner.in_chunks(ids, positions, in_chunks)
        _compare(model, "the same text in two chunks and a decode step", chunked, exact, torch.float32)
    dtype = model.module.dtype
    if dtype is not torch.float32:
        rounded = _Runner(model, layers, dtype).in_chunks(ids, positions, in_chunks)
        _compare(model, f"{dtype} in place of float32", rounded, exact, dtype)
    kernels = None if rewrite is None else rewrite(model)
    if kernels is not None:
        runner = _Runner(model, layers, dtype, kernels)
        _compare(model, "its layers rewritten", runner.in_chunks(ids, positions, [num_tokens]), exact, dtype)
        chunked = runner.in_chunks(ids, positions, in_chunks)
        _compare(model, "its layers rewritten, in two chunks and a decode step", chunked, exact, dtype)


@contextlib.contextmanager
def _in_float32(module: Any) -> Iterator[None]:
    """The weights of each part of a model are float32 while that part runs, so that no second model is in memory."""
    if module.dtype is torch.float32:
        yield
        return
    kept: dict[torch.nn.Module, dict[str, torch.nn.Parameter]] = {}

    def widen(part: torch.nn.Module, _: Any) -> None:
        kept[part] = dict(part.named_parameters(recurse=False))
        for name, weight in kept[part].items():
            setattr(part, name, torch.nn.Parameter(weight.float(), requires_grad=False))

    def restore(part: torch.nn.Module, *_: Any) -> None:
        for name, weight in kept.pop(part, {}).items():
            setattr(part, name, weight)

    hooks = []
    for part in module.modules():
        hooks += [part.register_forward_pre_hook(widen), part.register_forward_hook(restore)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for part in list(kept):
            restore(part)


class _Runner:
    def __init__(
        self, model: LoadedModel, layers: list[LayerShape], dtype: torch.dtype, kernels: NativeKernels | None = None
    ) -> None:
        self._model = model
        self._layers = layers
        self._dtype = dtype
        self._kernels = kernels

    def in_chunks(self, ids: torch.Tensor, positions: torch.Tensor, ends: list[int]) -> torch.Tensor:
        """Logits of the last two tokens, float32 [2, vocab_size]; a chunk of one token is decoded."""
        blocks = blocks_for(len(ids), _BLOCK_SIZE)
        cache = KVCache(self._layers, 1 + blocks, _BLOCK_SIZE, self._dtype)
        kept = []
        for start, end in zip([0, *ends], ends, strict=False):
            context = PagedContext(
                cache=cache,
                phase=Phase.DECODE if end - start == 1 else Phase.PREFILL,
                rows=torch.arange(start, end) + _BLOCK_SIZE,
                block_tables=torch.arange(1, 1 + blocks)[None],
                context_lens=torch.tensor([end]),
                longest_context=end,
                num_tokens=end - start,
                kernels=self._kernels,
            )
            keep = torch.arange(max(start, end - 2), end) - start
            logits = self._model.logits(ids[None, start:end], positions[None, start:end], context, keep)
            if logits.shape != (len(keep), self._model.info.vocab_size):
                shape = list(logits.shape)
                raise _refuse(self._model, f"gives logits of {shape} for {len(keep)} tokens of its vocabulary")
            kept.append(logits)
        return torch.cat(kept)[-2:]


def _own_logits(model: LoadedModel, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    model.module.set_attn_implementation("eager")
    try:
        # The mask says that all of it is one sequence; positions with a gap alone would be taken for two.
        is_token = torch.ones(1, len(ids), dtype=torch.long)
        output = model.module(
            input_ids=ids[None], position_ids=positions[None], attention_mask=is_token, use_cache=False
        )
        logits: torch.Tensor = output.logits
    finally:
        model.module.set_attn_implementation(IMPLEMENTATION)
    return logits[0, -2:].float()


def _compare(model: LoadedModel, what: str, ours: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> None:
    spread = (other - other.mean(dim=-1, keepdim=True)).norm()
    difference = float((ours - other).norm() / spread.clamp(min=1e-20))
    limit = _TOLERANCE[dtype]
    if not difference <= limit:  # NaN is refused too
        raise _refuse(model, f"gives other logits with {what}: they differ by {difference:.2g}, allowed: {limit}")


@contextlib.contextmanager
def _refusing_what_it_raises(model: LoadedModel) -> Iterator[None]:
    """Called as no model expects it, a model may raise anything."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise _refuse(model, f"cannot run with paged attention: {describe_error(error)}") from error


def _refuse(model: LoadedModel, problem: str) -> ConfigError:
    kind = type(model.module).__name__
    return ConfigError(f"model is {model.info.name!r}, a {kind}, which {problem}; it cannot be served correctly")
