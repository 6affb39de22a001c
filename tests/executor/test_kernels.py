"""The kernels in C++ against the same in float32."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from executor_svc import kernels
from executor_svc.attention import AttentionCall, PagedContext
from executor_svc.fast_model import FusedLayers, PackedLinear
from executor_svc.kernels import NativeKernels, load_kernels
from executor_svc.kernels.build import FLAGS, compile_kernels, find_missing_features
from executor_svc.kv_cache import KVCache, LayerShape
from holdback.types import Phase
from tests.executor.tiny_models import build_device, decode_step, prefill_step, save_model
from tests.executor.wide_models import by_token, run_logits, token_ids, wide_llama

HEADS, KV_HEADS = 6, 2
BLOCK_SIZE = 16
NO_KERNELS = find_missing_features()
needs_kernels = pytest.mark.skipif(bool(NO_KERNELS), reason=f"the processor lacks {', '.join(NO_KERNELS)}")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeKernels:
    found, text = load_kernels()
    assert found is not None, text
    return found


def bfloat16(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# Linear layers


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 2), (1, 64), (45, 130), (96, 576)])
@pytest.mark.parametrize("rows", [1, 2, 11, 12, 13, 40])
def test_a_packed_linear_layer_gives_what_float32_gives(
    native: NativeKernels, rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    hidden, weight, bias = bfloat16(rows, inputs, seed=1), bfloat16(outputs, inputs, seed=2), bfloat16(outputs, seed=3)
    expected = hidden.float() @ weight.float().T
    (packed,) = native.pack(weight)
    tolerance: dict[str, Any] = {"atol": 1e-3, "rtol": 1e-5 if dtype is torch.float32 else 5e-3}
    torch.testing.assert_close(native.linear(hidden, packed, None, dtype).float(), expected, **tolerance)
    torch.testing.assert_close(native.linear(hidden, packed, bias, dtype).float(), expected + bias, **tolerance)


@needs_kernels
def test_a_row_of_a_linear_layer_has_the_same_bits_whoever_shares_its_batch(native: NativeKernels) -> None:
    hidden, (packed,) = bfloat16(40, 576, seed=1), native.pack(bfloat16(96, 576, seed=2))
    together = native.linear(hidden, packed, None, torch.float32)
    for row in range(40):
        assert native.linear(hidden[row : row + 1], packed, None, torch.float32).equal(together[row : row + 1])


@needs_kernels
def test_a_weight_that_is_not_bfloat16_or_of_odd_width_is_refused(native: NativeKernels) -> None:
    with pytest.raises(ValueError, match=r"weight is torch.float32 \[4, 4\]"):
        native.pack(torch.zeros(4, 4))
    with pytest.raises(ValueError, match=r"weight is torch.bfloat16 \[4, 3\]"):
        native.pack(torch.zeros(4, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"input is torch.bfloat16 \[1, 6\]; allowed: bfloat16 \[..., 4\]"):
        native.linear(bfloat16(1, 6, seed=1), native.pack(bfloat16(4, 4, seed=1))[0], None, torch.float32)


# The largest logits


@needs_kernels
@pytest.mark.parametrize("size", [1, 15, 16, 64, 65, 1000])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_first_of_the_largest_logits_is_found(native: NativeKernels, rows: int, size: int) -> None:
    """Of few different numbers, so that many are equal."""
    numbers = torch.randint(-3, 3, (rows, size), generator=torch.Generator().manual_seed(size)).float()
    largest, is_finite = native.rank(numbers)
    assert largest.tolist() == [row.index(max(row)) for row in numbers.tolist()]
    assert is_finite.all()


@needs_kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 17, 99])
def test_a_row_with_a_number_that_is_not_finite_is_told_from_the_others(
    native: NativeKernels, value: float, place: int
) -> None:
    numbers = torch.zeros(3, 100)
    numbers[1, place] = value
    numbers[2, 50] = 1.0
    largest, is_finite = native.rank(numbers)
    assert is_finite.tolist() == [True, False, True]
    assert (int(largest[0]), int(largest[2])) == (0, 50)


# Attention


class Memory:
    """Pages full of NaN, but for one sequence whose blocks lie in no order."""

    def __init__(self, length: int, head_dim: int, seed: int = 0) -> None:
        self.length = length
        num_blocks = -(-length // BLOCK_SIZE)
        self.cache = KVCache([LayerShape(KV_HEADS, head_dim)], num_blocks + 2, BLOCK_SIZE, torch.bfloat16)
        order = np.random.default_rng(seed).permutation(num_blocks) + 1
        self.table = torch.from_numpy(np.append(order, 0).astype(np.int64))
        self.key, self.value = (
            bfloat16(length, KV_HEADS, head_dim, seed=1),
            bfloat16(length, KV_HEADS, head_dim, seed=2),
        )
        self.query = bfloat16(length, HEADS, head_dim, seed=3)
        for pages in (self.cache.keys[0], self.cache.values[0]):
            pages.fill_(float("nan"))
        self.cache.write(0, self.rows(0, length), self.key, self.value)

    def rows(self, start: int, end: int) -> torch.Tensor:
        places = torch.arange(start, end)
        return self.table[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE

    def context(self, phase: Phase, start: int, kernels: NativeKernels) -> PagedContext:
        return PagedContext(
            cache=self.cache,
            phase=phase,
            rows=self.rows(start, self.length),
            block_tables=self.table[None],
            context_lens=torch.tensor([self.length]),
            longest_context=self.length,
            num_tokens=self.length - start,
            kernels=kernels,
        )

    def attend(self, native: NativeKernels, start: int, window: int | None) -> torch.Tensor:
        """Tokens from `start` on: [tokens, heads, head_dim]. A single one is decoded."""
        phase = Phase.DECODE if start == self.length - 1 else Phase.PREFILL
        query, key, value = (part[None, start:].transpose(1, 2) for part in (self.query, self.key, self.value))
        call = AttentionCall(0, query, key, value, 0.3, sliding_window=window)
        return self.context(phase, start, native).attend(call)[0]

    def expected(self, start: int, window: int | None) -> torch.Tensor:
        """From the definition, in float64: [tokens from `start` on, heads, head_dim]."""
        key, value = (part.double().repeat_interleave(3, dim=1) for part in (self.key, self.value))
        scores = torch.einsum("thd,shd->hts", self.query[start:].double(), key) * 0.3
        distance = torch.arange(start, self.length)[:, None] - torch.arange(self.length)
        is_seen = (distance >= 0) & (distance < (window or self.length))
        weights = torch.softmax(scores.masked_fill(~is_seen, float("-inf")), dim=-1)
        return torch.einsum("hts,shd->thd", weights, value)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, atol=0.02, rtol=0.01)


@needs_kernels
@pytest.mark.case("B26")
@pytest.mark.parametrize("window", [None, 5, 700])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [1, 16, 17, 512, 513, 1200])
def test_decode_sees_its_own_context_alone(
    native: NativeKernels, length: int, head_dim: int, window: int | None
) -> None:
    """Everything around the context is NaN: the rest of its last block, the null block, other blocks."""
    memory = Memory(length, head_dim)
    assert_close(memory.attend(native, length - 1, window), memory.expected(length - 1, window))


@needs_kernels
@pytest.mark.case("B26")
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("start", "length"), [(0, 2), (0, 64), (0, 150), (1, 70), (63, 65), (64, 300), (250, 277)])
def test_a_chunk_sees_what_was_computed_before_it_and_itself_causally(
    native: NativeKernels, start: int, length: int, head_dim: int, window: int | None
) -> None:
    memory = Memory(length, head_dim)
    assert_close(memory.attend(native, start, window), memory.expected(start, window))


@needs_kernels
def test_a_value_that_is_not_finite_shows_in_the_rows_that_see_it(native: NativeKernels) -> None:
    """It may show in tokens before it too, of the same sequence and the same block of 64, and in none before those."""
    memory = Memory(140, 64)
    memory.value[100] = float("inf")
    memory.cache.write(0, memory.rows(0, 140), memory.key, memory.value)
    assert not memory.attend(native, 139, None).isfinite().any()
    found = memory.attend(native, 1, None)
    assert found[: 64 - 1].isfinite().all()
    assert not found[100 - 1 :].isfinite().any()


# A whole model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("models") / "wide", wide_llama())


@needs_kernels
def test_fused_layers_are_closer_to_float32_than_bfloat16_alone_is(llama: pathlib.Path) -> None:
    found = {}
    variants: dict[str, dict[str, Any]] = {
        "exact": {"dtype": "float32"},
        "plain": {"dtype": "bfloat16", "use_kernels": False},
        "fused": {"dtype": "bfloat16"},
    }
    for name, settings in variants.items():
        device = build_device(llama, **settings)
        assert any(isinstance(part, FusedLayers) for part in device._model.module.modules()) == (name == "fused")
        found[name] = torch.stack([by_token(row) for row in run_logits(device, [11, 6, 16])])
        device.close()
    error = {name: float((found[name] - found["exact"]).norm()) for name in ("plain", "fused")}
    assert error["fused"] < error["plain"]


@needs_kernels
def test_in_fused_layers_a_row_has_the_same_bits_alone_and_in_a_batch(llama: pathlib.Path) -> None:
    device = build_device(llama, dtype="bfloat16")
    together = run_logits(device, [11, 6, 16])
    lengths, tables = [11, 6, 16], [list(range(1 + 8 * slot, 9 + 8 * slot)) for slot in range(3)]
    device.reset()
    run_logits(device, lengths)
    for slot in range(3):
        # The same token again at the same place: the device still has it as the slot's last one only before a decode.
        ids = token_ids(lengths[slot], seed=slot)
        cut = lengths[slot] // 2
        device.collect(device.launch(prefill_step(device, ids[cut:], tables[slot], start=cut, slot=slot)))
        alone = device.collect(device.launch(decode_step(device, [lengths[slot]], [tables[slot]], [slot])))
        assert alone.logprobs[0] == together[slot]
    device.close()


@pytest.fixture(scope="module")
def stalling_library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The kernels compiled so that each 97th share waits for 300 us once a thread has taken it."""
    path = tmp_path_factory.mktemp("stalling") / "kernels.so"
    flags = [flag for flag in FLAGS if flag != "-O3"]
    compile_kernels(path, [*flags, "-O1", "-DHOLDBACK_STALLS=97"])
    return path


@needs_kernels
@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_that_are_held_up_change_no_bit(
    tmp_path: pathlib.Path, stalling_library: pathlib.Path, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """Others do their shares again, and they come back to operations that are over."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "max_position_embeddings": 256}
    directory = save_model(tmp_path / "six", wide_llama(**wide))
    monkeypatch.setattr(kernels, "build", lambda *_, **__: (stalling_library, False))
    found: dict[int, list[Any]] = {}
    for threads, repetitions in ((1, 1), (num_threads, 15)):
        device = build_device(
            directory, dtype="bfloat16", num_threads=threads, num_blocks=65, num_batched_tokens_buckets=(8, 16, 128)
        )
        found[threads] = []
        for _ in range(repetitions):
            prefill = prefill_step(device, token_ids(100), list(range(32, 58)))
            found[threads].append([device.collect(device.launch(prefill)).logprobs, run_logits(device, [11, 6, 16])])
        device.close()
    assert all(result == found[1][0] for result in found[num_threads])


@needs_kernels
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_models_that_are_not_fused_run_with_packed_layers(tmp_path: pathlib.Path, family: str) -> None:
    configs: dict[str, Any] = {
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig,
    }
    sizes = wide_llama().to_dict()
    keys = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    keys += ["num_key_value_heads", "head_dim", "max_position_embeddings", "initializer_range", "pad_token_id"]
    config = configs[family](**{key: sizes[key] for key in keys}, sliding_window=5)
    if family == "mistral":
        config.hidden_act = "gelu"
    directory = save_model(tmp_path / family, config)
    device = build_device(directory, dtype="bfloat16")
    packed = [part for part in device._model.module.modules() if isinstance(part, PackedLinear)]
    assert len(packed) == 3 * 7 + 1
    assert "linear layers packed" in device.kernels
    exact = build_device(directory, dtype="float32")
    for ours, reference in zip(run_logits(device, [14, 9]), run_logits(exact, [14, 9]), strict=True):
        torch.testing.assert_close(by_token(ours), by_token(reference), atol=0.5, rtol=0)
    device.close()
    exact.close()
