"""KV memory: where tokens land."""

from __future__ import annotations

import pytest
import torch

from executor_svc.kv_cache import KVCache, LayerShape, block_bytes

LAYERS = [LayerShape(2, 8), LayerShape(2, 8)]


def test_memory_is_zero_and_has_one_block_more_than_num_blocks() -> None:
    cache = KVCache(LAYERS, num_blocks=3, block_size=4, dtype=torch.bfloat16)
    for pages in [*cache.keys, *cache.values]:
        assert pages.shape == (4, 4, 2, 8)
        assert pages.dtype is torch.bfloat16
        assert not pages.any()


@pytest.mark.case("B26")
def test_slot_minus_1_is_the_sink_and_not_the_last_slot() -> None:
    cache = KVCache(LAYERS, num_blocks=3, block_size=4, dtype=torch.float32)
    rows = cache.rows_for(torch.tensor([5, -1, -1, 11]))
    assert rows.tolist() == [5, 12, 12, 11]
    tokens = torch.arange(1.0, 5.0)[:, None, None].expand(4, 2, 8)
    cache.write(1, rows, tokens, tokens * 10)
    flat = cache.keys[1].flatten(0, 1)[:, 0, 0]
    assert flat[5] == 1
    assert flat[11] == 4
    assert torch.count_nonzero(flat[:12]) == 2
    assert cache.values[1][1, 1, 0, 0] == 10
    assert not cache.keys[0].any()


def test_pages_are_gathered_in_the_order_of_the_block_table() -> None:
    cache = KVCache([LayerShape(1, 1)], num_blocks=4, block_size=2, dtype=torch.float32)
    cache.keys[0].copy_(torch.arange(10.0).view(5, 2, 1, 1))
    keys, values = cache.gather(0, torch.tensor([[3, 1], [2, 0]]))
    assert keys.shape == (2, 4, 1, 1)
    assert keys.flatten(1).tolist() == [[6, 7, 2, 3], [4, 5, 0, 1]]
    assert not values.any()


def test_reset_zeroes_everything() -> None:
    cache = KVCache(LAYERS, num_blocks=3, block_size=4, dtype=torch.float32)
    cache.keys[0].fill_(float("nan"))
    cache.reset()
    assert not cache.keys[0].any()


def test_a_block_holds_keys_and_values_of_every_layer() -> None:
    # 2 (keys, values) * 16 tokens * 2 bytes * (2 * 8 + 2 * 8) numbers
    assert block_bytes(LAYERS, 16, torch.bfloat16) == 2048
