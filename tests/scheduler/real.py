"""The executor's own server on the simulated device, in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from executor_svc.config import ExecutorConfig
from executor_svc.server import ExecutorProcess

VOCAB_SIZE = 512


@contextlib.asynccontextmanager
async def real_executor(port: int, name: str = "executor-0", **settings: object) -> AsyncIterator[ExecutorProcess]:
    """Four slots of up to 64 tokens in blocks of 4, with less KV memory than slots."""
    config = ExecutorConfig.model_validate(
        {
            "scheduler": f"127.0.0.1:{port}",
            "device": "simulated",
            "executor_id": name,
            "max_model_len": 64,
            "block_size": 4,
            "num_blocks": 49,
            "max_num_seqs": 4,
            "num_batched_tokens_buckets": (8, 16),
            "max_num_batched_tokens": 16,
            "simulated_vocab_size": VOCAB_SIZE,
            "simulated_decode_us": 100,
        }
        | settings
    )
    process = ExecutorProcess(config)
    running = asyncio.create_task(process.run())
    try:
        yield process
    finally:
        process.stop()
        assert await running == 0


def prompt_of(handle: int) -> list[int]:
    """Of 1 to 33 tokens, in pairs with a common start."""
    return [17 + handle // 2 * 3 + i for i in range(1 + handle * 7 % 33)]
