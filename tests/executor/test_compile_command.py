"""`--compile-only`, `--require-cached` and a compile cache that cannot be used, through the real command line."""

from __future__ import annotations

import asyncio
import json
import pathlib
import sys

import pytest

from executor_svc.kernels.build import find_missing_features
from tests.executor.serving import start_command
from tests.executor.stub_scheduler import StubScheduler
from tests.executor.tiny_models import llama_config, save_model

pytestmark = pytest.mark.loopback

NO_KERNELS = find_missing_features()
needs_kernels = pytest.mark.skipif(bool(NO_KERNELS), reason=f"the processor lacks {', '.join(NO_KERNELS)}")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    sizes = {"hidden_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    return save_model(tmp_path_factory.mktemp("models") / "tiny", llama_config(**sizes))


async def command(*arguments: str | pathlib.Path) -> tuple[int | None, str, str]:
    """Exit status, standard output and the last line of standard error of `holdback executor`."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdback.cli", "executor", *(str(argument) for argument in arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        output, errors = await child.communicate()
    assert b"Traceback" not in errors, errors.decode()
    return child.returncode, output.decode(), (errors.decode().splitlines() or [""])[-1]


@needs_kernels
async def test_a_compiler_that_fails_ends_compile_only_with_the_reason(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    status, output, last = await command(
        "--compile-only", "--device", "cpu", "--model", tiny_model, "--compile-cache", tmp_path / "cache"
    )
    assert (status, output.count("compiled for")) == (2, 0)
    assert last.startswith("holdback executor: the kernels of the cpu device cannot be built, as compile_only asks: ")
    assert "/bin/false ended with 1" in last


@needs_kernels
async def test_a_cache_is_filled_once_then_found_and_then_enough(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path, scheduler: StubScheduler
) -> None:
    cache = tmp_path / "cache"
    on_cpu = ("--device", "cpu", "--model", tiny_model, "--compile-cache", cache)
    status, _, last = await command("--scheduler", scheduler.target, *on_cpu, "--require-cached")
    assert status == 2
    assert last == (f"holdback executor: compile_cache is '{cache}', which cannot be used: No such file or directory")
    status, output, last = await command("--compile-only", *on_cpu)
    assert (status, output[:50]) == (0, "compiled for the device cpu: 1, found in the cache"), last
    status, output, last = await command("--compile-only", *on_cpu)
    assert (status, output[:53]) == (0, "compiled for the device cpu: 0, found in the cache: 1"), last
    child = await start_command(
        tmp_path, "--scheduler", scheduler.target, *(str(argument) for argument in on_cpu), "--require-cached"
    )
    registered = await scheduler.registrations.get()
    compiled = registered.info.compiled
    assert (compiled.num_hits, compiled.num_misses) == (1, 0)
    child.terminate()
    await child.communicate()


@needs_kernels
async def test_a_required_library_of_kernels_that_is_missing_is_one_sentence_and_2(
    tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    status, _, last = await command(
        *("--scheduler", "127.0.0.1:1", "--model", tiny_model, "--compile-cache", tmp_path, "--require-cached")
    )
    assert status == 2
    assert last.startswith("holdback executor: the kernels of the cpu device are not there, as require_cached asks: ")


@pytest.mark.parametrize("device", ["cpu", "simulated"])
async def test_a_compile_cache_that_cannot_be_used_is_refused_before_a_model_is_loaded(
    device: str, tiny_model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "file").write_text("")
    status, _, last = await command(
        *("--scheduler", "127.0.0.1:1", "--device", device, "--model", tiny_model, "--compile-cache", tmp_path / "file")
    )
    assert status == 2
    assert last == f"holdback executor: compile_cache is '{tmp_path / 'file'}', which is a file; allowed: a directory"


async def test_a_device_that_compiles_nothing_says_so(tmp_path: pathlib.Path) -> None:
    status, output, _ = await command("--device", "simulated", "--compile-only", "--compile-cache", tmp_path)
    assert (status, output) == (0, "the device simulated has nothing to compile, as configured\n")


async def test_a_device_that_compiles_nothing_has_all_that_is_required(
    tmp_path: pathlib.Path, scheduler: StubScheduler
) -> None:
    child = await start_command(tmp_path, "--scheduler", scheduler.target, "--require-cached")
    registered = await scheduler.registrations.get()
    assert not registered.info.HasField("compiled")
    child.terminate()
    _, errors = await child.communicate()
    summary = [json.loads(line) for line in errors.decode().splitlines() if '"graphs_ready"' in line]
    assert [(line["device"], line["num_misses"]) for line in summary] == [("simulated", None)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "simulated"], "scheduler is required"),
        (
            ["--device", "simulated", "--compile-only", "--require-cached"],
            "compile_only and require_cached are both set; allowed: one of them",
        ),
    ],
)
async def test_settings_without_a_purpose_are_refused(arguments: list[str], message: str) -> None:
    assert await command(*arguments) == (2, "", f"holdback executor: {message}")
