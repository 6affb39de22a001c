"""The compiled kernels as functions of tensors. What a caller must keep alive, and shapes, are said at each."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Sequence

import torch

from executor_svc.kernels.memory import WeightMemory
from holdback.types import CompileCounts, SamplingParams

PANEL = 32
HEAD_DIMS = frozenset({64, 128, 256})
"""Sizes of a head that the attention kernels are made for."""

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int64


class Pages(ctypes.Structure):
    """KV memory of one layer and how its attention sees it; `window` 0 sees all."""

    _fields_ = (
        ("keys", _Pointer),
        ("values", _Pointer),
        ("block_size", _Int),
        ("kv_heads", _Int),
        ("heads", _Int),
        ("head_dim", _Int),
        ("scale", ctypes.c_float),
        ("window", _Int),
    )


class Layer(ctypes.Structure):
    """Weights and KV memory of one decoder layer; see layers.h."""

    _fields_ = (
        *((name, _Pointer) for name in ("input_norm", "attention_norm", "query_key_value", "output", "gate_up")),
        *((name, _Pointer) for name in ("down", "keys", "values")),
        ("window", _Int),
    )


class Sizes(ctypes.Structure):
    """What all decoder layers share; see layers.h."""

    _fields_ = (
        *((name, _Int) for name in ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "block_size")),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("last_norm", _Pointer),
    )


class Step(ctypes.Structure):
    """One step for all decoder layers; see layers.h."""

    _fields_ = (
        ("is_prefill", _Int),
        ("rows", _Int),
        ("cache_rows", _Pointer),
        ("tables", _Pointer),
        ("width", _Int),
        ("lengths", _Pointer),
        ("cosine", _Pointer),
        ("sine", _Pointer),
    )


class PackedWeight:
    """A bfloat16 weight in the order in which the kernels read it.

    Attributes:
        data: bfloat16 [panels * 32 * inputs].
        outputs: rows of the weight it was packed from.
        inputs: its columns, even.
    """

    def __init__(self, data: torch.Tensor, outputs: int, inputs: int) -> None:
        self.data = data
        self.outputs = outputs
        self.inputs = inputs


class NativeKernels:
    """Runs on threads of its own, not torch's. One caller at a time; another one waits.

    Args:
        path: of the library.
        num_threads: that compute, the caller's included.
        compiled: what it took to have it.
    """

    def __init__(self, path: pathlib.Path, num_threads: int = 1, compiled: CompileCounts | None = None) -> None:
        self._num_threads = num_threads
        self.compiled = compiled
        library = ctypes.CDLL(str(path))
        for name in ("pack", "linear", "rank", "draw", "decode_attention", "prefill_attention", "layers"):
            getattr(library, f"holdback_{name}").restype = None
        self._pack = library.holdback_pack
        self._pack.argtypes = [_Pointer, _Int, _Int, _Pointer, ctypes.c_int]
        self._linear = library.holdback_linear
        self._linear.argtypes = [_Pointer, _Int, _Int, _Pointer, _Int, _Pointer, _Pointer, ctypes.c_int, ctypes.c_int]
        self._rank = library.holdback_rank
        self._rank.argtypes = [_Pointer, _Int, _Int, _Pointer, _Pointer, ctypes.c_int]
        self._draw = library.holdback_draw
        self._draw.argtypes = [_Pointer, _Int, _Int, *[_Pointer] * 6, ctypes.c_int]
        self._decode = library.holdback_decode_attention
        self._decode.argtypes = [_Pointer, _Int, _Pointer, _Int, _Pointer, _Pointer, _Pointer, ctypes.c_int]
        self._prefill = library.holdback_prefill_attention
        self._prefill.argtypes = [_Pointer, _Int, _Int, _Pointer, _Pointer, _Pointer, ctypes.c_int]
        self._layers = library.holdback_layers
        self._layers.argtypes = [_Pointer, _Int, _Pointer, _Pointer, _Pointer, ctypes.c_int]

    def pack(self, *weights: torch.Tensor) -> tuple[PackedWeight, ...]:
        """Packs bfloat16 weights [outputs, inputs], `inputs` even, one behind the other in memory."""
        for weight in weights:
            if weight.dtype is not torch.bfloat16 or weight.shape[1] % 2:
                found = f"{weight.dtype} {list(weight.shape)}"
                raise ValueError(f"weight is {found}; allowed: bfloat16 with an even last size")
        sizes = [-(-len(weight) // PANEL) * PANEL * weight.shape[1] for weight in weights]
        memory = WeightMemory(sizes)
        return tuple(self._packed(weight, memory.take(size)) for weight, size in zip(weights, sizes, strict=True))

    def _packed(self, weight: torch.Tensor, data: torch.Tensor) -> PackedWeight:
        outputs, inputs = weight.shape
        weight = weight.contiguous()
        self._pack(weight.data_ptr(), outputs, inputs, data.data_ptr(), self._num_threads)
        return PackedWeight(data, outputs, inputs)

    def linear(
        self, hidden: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """`hidden` (bfloat16 [..., inputs]) times the weight: [..., outputs] in bfloat16 or float32."""
        if hidden.dtype is not torch.bfloat16 or hidden.shape[-1] != weight.inputs:
            raise ValueError(f"input is {hidden.dtype} {list(hidden.shape)}; allowed: bfloat16 [..., {weight.inputs}]")
        hidden = hidden.contiguous()
        out = torch.empty(*hidden.shape[:-1], weight.outputs, dtype=dtype)
        self._linear(
            hidden.data_ptr(),
            hidden.numel() // weight.inputs,
            weight.inputs,
            weight.data.data_ptr(),
            weight.outputs,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            int(dtype is torch.float32),
            self._num_threads,
        )
        return out

    def rank(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely token of each row of `logits` (float32 [rows, vocab_size]), the lowest id among equals.

        Returns:
            int64 [rows], which means nothing where a row is not finite; and whether it is, bool [rows].
        """
        logits = logits.contiguous()
        rows, size = logits.shape
        largest, is_finite = torch.empty(rows, dtype=torch.long), torch.empty(rows, dtype=torch.bool)
        pointers = (largest.data_ptr(), is_finite.data_ptr())
        self._rank(logits.data_ptr(), rows, size, *pointers, self._num_threads)
        return largest, is_finite

    def draw(self, logits: torch.Tensor, params: Sequence[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
        """As `executor_svc.draw.draw`: a token for each row of `logits` (float32 [rows, vocab_size]), int64 [rows]."""
        logits, uniform = logits.contiguous(), uniform.contiguous()
        rows, size = logits.shape
        floats = torch.tensor([[row.temperature, row.top_p, row.min_p] for row in params], dtype=torch.float32)
        temperature, top_p, min_p = floats.T.contiguous()
        top_k = torch.tensor([size if row.top_k is None else row.top_k for row in params], dtype=torch.long)
        tokens = torch.empty(rows, dtype=torch.long)
        given = (logits, temperature, top_p, min_p, top_k, uniform, tokens)
        pointers = [tensor.data_ptr() for tensor in given]
        self._draw(pointers[0], rows, size, *pointers[1:], self._num_threads)
        return tokens

    def decode_attention(
        self, pages: Pages, query: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
    ) -> torch.Tensor:
        """One token of each sequence.

        Args:
            pages: of the layer.
            query: bfloat16 [rows, heads, head_dim], contiguous.
            block_tables: int64 [rows, blocks], its last dimension contiguous.
            context_lens: int64 [rows], contiguous, each >= 1.

        Returns:
            As `query`.
        """
        out = torch.empty_like(query)
        self._decode(
            ctypes.byref(pages),
            query.shape[0],
            block_tables.data_ptr(),
            block_tables.stride(0),
            context_lens.data_ptr(),
            query.data_ptr(),
            out.data_ptr(),
            self._num_threads,
        )
        return out

    def prefill_attention(
        self, pages: Pages, query: torch.Tensor, block_table: torch.Tensor, start: int
    ) -> torch.Tensor:
        """Tokens from `start` on of one sequence: query bfloat16 [T, heads, head_dim], block_table int64 [blocks]."""
        out = torch.empty_like(query)
        self._prefill(
            ctypes.byref(pages),
            query.shape[0],
            start,
            block_table.data_ptr(),
            query.data_ptr(),
            out.data_ptr(),
            self._num_threads,
        )
        return out

    def layers(self, layers: ctypes.Array[Layer], sizes: Sizes, step: Step, hidden: torch.Tensor) -> None:
        """Runs all layers and the last norm in place on the first `step.rows` rows of `hidden`, bfloat16 [..., hidden],
        contiguous.
        """
        self._layers(
            layers,
            len(layers),
            ctypes.byref(sizes),
            ctypes.byref(step),
            hidden.data_ptr(),
            self._num_threads,
        )


def make_layers(layers: Sequence[Layer]) -> ctypes.Array[Layer]:
    """The array that `NativeKernels.layers` takes."""
    return (Layer * len(layers))(*layers)
