"""A whole pool as real processes on the simulated device, shared by the tests of a module."""

from __future__ import annotations

import pathlib

import pytest
import pytest_asyncio

from holdback.cli.local import LocalStack
from tests.gateway.small_tokenizers import make_tokenizer, save_directory

VOCAB_SIZE = 512
MAX_MODEL_LEN = 256
CHUNK = 64


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_directory(directory, make_tokenizer("byte_level"))
    return directory


@pytest.fixture(scope="session")
def stack_arguments(tokenizer_directory: pathlib.Path) -> dict[str, list[str]]:
    executor = {
        "device": "simulated",
        "simulated-vocab-size": VOCAB_SIZE,
        "max-model-len": MAX_MODEL_LEN,
        "max-num-batched-tokens": CHUNK,
        "num-batched-tokens-buckets": f"32,{CHUNK}",
        "max-num-seqs": 4,
        "simulated-decode-us": 2_000,
    }
    return {
        "executor": [part for key, value in executor.items() for part in (f"--{key}", str(value))],
        "gateway": ["--tokenizer", str(tokenizer_directory), "--served-model-name", "small,tiny"],
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(stack_arguments):
    async with LocalStack(stack_arguments) as running:
        await running.wait_until_ready()
        yield running
