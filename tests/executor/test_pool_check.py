"""An executor with another model than its pool's is told so before it loads it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import pytest

from executor_svc.config import ExecutorConfig
from executor_svc.devices import create_device
from executor_svc.model_description import describe_model
from executor_svc.pool_check import check_pool, compare
from holdback.errors import ErrorReason, FailedPreconditionError
from holdback.types import ModelInfo
from tests.executor.serving import build_config, free_port
from tests.executor.stub_scheduler import StubScheduler
from tests.executor.tiny_models import MAX_MODEL_LEN, VOCAB_SIZE, save_model

POOL = ModelInfo("f", "the pool's", VOCAB_SIZE, (2,), MAX_MODEL_LEN)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


def config_of(model: pathlib.Path, target: str, **changes: Any) -> ExecutorConfig:
    return ExecutorConfig(scheduler=target, model=model, **({"device": "cpu", "dtype": "float32"} | changes))


def test_the_files_of_a_model_tell_what_it_says_once_loaded(tiny_model: pathlib.Path) -> None:
    device = create_device(config_of(tiny_model, "127.0.0.1:1", max_model_len=48, num_blocks=4))
    assert describe_model(tiny_model, "float32", 48) == device.model
    device.close()


def test_a_config_that_leaves_the_vocabulary_to_transformers_tells_nothing(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    copy = pathlib.Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    del config["vocab_size"]
    (copy / "config.json").write_text(json.dumps(config))
    assert describe_model(copy, "float32", None) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": "g"}, "model.fingerprint is 'f'; allowed: 'g', that of the pool"),
        ({"vocab_size": 9}, "model.vocab_size is 128; allowed: 9, that of the pool"),
        ({"eos_token_ids": (2, 5)}, "model.eos_token_ids is (2,); allowed: (2, 5), that of the pool"),
        ({"max_model_len": 32}, "model.max_model_len is 64; allowed: 32, that of the pool"),
    ],
)
def test_each_field_that_a_pool_has_in_common_is_compared(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FailedPreconditionError) as raised:
        compare(POOL, dataclasses.replace(POOL, **changes))
    assert (raised.value.message, raised.value.reason) == (message, ErrorReason.MODEL_MISMATCH)


def test_a_name_is_for_people() -> None:
    compare(dataclasses.replace(POOL, name="ours"), POOL)


@pytest.mark.loopback
async def test_another_model_than_the_pools_is_refused_before_it_is_loaded(
    tiny_model: pathlib.Path, scheduler: StubScheduler
) -> None:
    ours = describe_model(tiny_model, "float32", None)
    assert ours is not None
    scheduler.pool_model = dataclasses.replace(ours, name="other")
    await check_pool(config_of(tiny_model, scheduler.target))
    scheduler.pool_model = dataclasses.replace(ours, fingerprint="other")
    with pytest.raises(FailedPreconditionError, match=r"model.fingerprint is '.*-float32'; allowed: 'other'"):
        await check_pool(config_of(tiny_model, scheduler.target))


@pytest.mark.loopback
async def test_a_pool_without_a_model_and_a_scheduler_that_is_not_there_are_left_to_the_registration(
    tiny_model: pathlib.Path, scheduler: StubScheduler
) -> None:
    await check_pool(config_of(tiny_model, scheduler.target))
    await check_pool(config_of(tiny_model, f"127.0.0.1:{free_port()}"))


@pytest.mark.loopback
async def test_a_device_that_loads_nothing_asks_nobody(scheduler: StubScheduler) -> None:
    scheduler.pool_model = POOL
    await check_pool(build_config(scheduler.target))
