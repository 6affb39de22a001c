"""The rewrite of a loaded model for the kernels: which of its modules are replaced, and by what.

The model stays transformers' definition. What is replaced computes the same from the same weights:

- Of a Llama or Mistral, exactly that class and in its usual form, the list of decoder layers becomes one module that
  runs them all and the last norm (`FusedLayers`), whose own module then passes on what it gets; embeddings and rotary
  positions stay.
- Of any other model, each `torch.nn.Linear` becomes a `PackedLinear`.
- The output layer becomes a `PackedLinear` that gives float32, in both.

Between two operations numbers are rounded to bfloat16 less often than in transformers' own forward, never more. Padding
rows are left as they came in. `model_probe.check_logits` compares both forwards at load.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM

from executor_svc.attention import PagedContext
from executor_svc.kernels.native import HEAD_DIMS, Layer, NativeKernels, Sizes, Step, make_layers
from holdback.types import Phase

_FUSED_MODELS = (LlamaForCausalLM, MistralForCausalLM)


class PackedLinear(torch.nn.Module):
    """A linear layer whose weight lies as the kernels read it; its result in `dtype`."""

    def __init__(self, kernels: NativeKernels, linear: torch.nn.Linear, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._kernels = kernels
        (self._weight,) = kernels.pack(linear.weight)
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._dtype = dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._kernels.linear(hidden, self._weight, self._bias, self._dtype)


class _LayerWeights:
    """Packed weights of one decoder layer, with queries, keys and values in one and gate and up in one."""

    def __init__(self, kernels: NativeKernels, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm = layer.input_layernorm.weight.detach()
        self.attention_norm = layer.post_attention_layernorm.weight.detach()
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.packed = kernels.pack(
            torch.cat([projection.weight for projection in projections]),
            attention.o_proj.weight,
            _interleaved(mlp.gate_proj.weight, mlp.up_proj.weight),
            mlp.down_proj.weight,
        )

    def as_layer(self, keys: torch.Tensor, values: torch.Tensor, window: int) -> Layer:
        tensors = (self.input_norm, self.attention_norm, *(weight.data for weight in self.packed), keys, values)
        return Layer(*(tensor.data_ptr() for tensor in tensors), window)


def _interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """16 rows of gate, the same 16 of up, and so on: what one panel holds."""
    return torch.stack([part.view(-1, 16, part.shape[1]) for part in (gate, up)], dim=1).flatten(0, 2)


class FusedLayers(torch.nn.Module):
    """All decoder layers of a Llama and the norm behind them, called as one layer. Needs a `PagedContext`."""

    def __init__(self, kernels: NativeKernels, layers: Any, norm: Any, config: Any) -> None:
        super().__init__()
        self._kernels = kernels
        self._last_norm = norm.weight.detach()
        self._weights = [_LayerWeights(kernels, layer) for layer in layers]
        self._window = getattr(config, "sliding_window", None) or 0
        attention = layers[0].self_attn
        self._shape = {
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": attention.head_dim,
            "intermediate": config.intermediate_size,
            "epsilon": config.rms_norm_eps,
            "scale": attention.scaling,
        }
        self._pages: list[torch.Tensor] | None = None
        self._layers: ctypes.Array[Layer] | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        holdback: PagedContext,
        **_: Any,
    ) -> torch.Tensor:
        """hidden_states: bfloat16 [1, T, hidden] or [B, 1, hidden]; the same comes out."""
        hidden = hidden_states.contiguous().clone()
        cosine, sine = (part.contiguous() for part in position_embeddings)
        rows = holdback.rows
        step = Step(
            is_prefill=holdback.phase is Phase.PREFILL,
            rows=holdback.num_tokens,
            cache_rows=rows.data_ptr(),
            tables=holdback.block_tables.data_ptr(),
            width=holdback.block_tables.stride(0),
            lengths=holdback.context_lens.data_ptr(),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
        )
        last_norm = self._last_norm.data_ptr()
        sizes = Sizes(**self._shape, block_size=holdback.cache.block_size, last_norm=last_norm)
        self._kernels.layers(self._layers_with(holdback), sizes, step, hidden)
        return hidden

    def _layers_with(self, context: PagedContext) -> ctypes.Array[Layer]:
        """The layers with the addresses of the context's KV memory, which a reset changes."""
        cache = context.cache
        if self._layers is None or self._pages is not cache.keys:
            pairs = zip(self._weights, cache.keys, cache.values, strict=True)
            made = [weights.as_layer(keys, values, self._window) for weights, keys, values in pairs]
            self._layers = make_layers(made)
            self._pages = cache.keys
        return self._layers


@torch.inference_mode()
def rewrite(module: Any, kernels: NativeKernels) -> str:
    """Replaces what the kernels compute of a bfloat16 model, in place, and returns what that is in a few words."""
    if can_fuse(module):
        fused = FusedLayers(kernels, module.model.layers, module.model.norm, module.config)
        module.model.layers, module.model.norm = torch.nn.ModuleList([fused]), torch.nn.Identity()
        what = "layers fused"
    else:
        _pack_linears(module, kernels)
        what = "linear layers packed"
    head = getattr(module, "lm_head", None)
    if isinstance(head, torch.nn.Linear) and head.in_features % 2 == 0:
        module.lm_head = PackedLinear(kernels, head, torch.float32)
    return what


def can_fuse(module: Any) -> bool:
    """Whether the decoder layers are those that `FusedLayers` computes."""
    if type(module) not in _FUSED_MODELS:
        return False
    config = module.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    has_bias = getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)
    is_whole = config.hidden_size % 16 == 0 and config.intermediate_size % 16 == 0
    return config.hidden_act == "silu" and head_dim in HEAD_DIMS and is_whole and not has_bias


def is_fused(module: Any) -> bool:
    """Whether `rewrite` fused its layers. Then a row's result depends on that row alone, bit by bit."""
    return any(isinstance(part, FusedLayers) for part in module.modules())


def _pack_linears(module: torch.nn.Module, kernels: NativeKernels) -> None:
    head = getattr(module, "lm_head", None)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child is not head and child.in_features % 2 == 0:
                setattr(parent, name, PackedLinear(kernels, child))
