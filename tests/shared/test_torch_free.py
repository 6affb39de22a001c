"""Scheduler and gateway install and start without torch.

What an extra installs is followed through the metadata of the installed distributions. The services are then started as
real processes in which every module that the extra does not install is as if it were not there: what they import,
also late, must come from their own extra. Not covered: a fresh environment made by pip; the requirements that pip would
read are the ones read here.
"""

from __future__ import annotations

import asyncio
import json
import pathlib
import re
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import metadata

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from holdback import rpc
from holdback.cli.local import LocalProcess
from holdback.health import LIVENESS
from tests.gateway.small_tokenizers import make_tokenizer, save_directory

ROOT = pathlib.Path(__file__).resolve().parents[2]
OWN = frozenset({"holdback", "scheduler_svc", "executor_svc", "gateway"})
HEAVY = frozenset({"torch", "transformers", "accelerate", "safetensors", "gguf", "numpy"})
MAX_IDLE_BYTES = 200_000_000

# Runs `holdback ARGUMENTS` with some top-level modules missing.
LAUNCH = """
import importlib.abc, json, sys

class Missing(importlib.abc.MetaPathFinder):
    names = frozenset(json.loads(sys.argv.pop(1)))
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from holdback.cli import main
sys.exit(main())
"""


def installed_by(*extras: str) -> frozenset[str]:
    """Names of all distributions that `pip install holdback[extras]` brings, holdback itself left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    todo = [Requirement(line) for line in lines]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key not in seen:
            seen.add(key)
            todo += requirements_of(requirement)
    return frozenset(name for name, _ in seen)


def requirements_of(requirement: Requirement) -> list[Requirement]:
    """What an installed distribution requires here, with the extras asked for."""
    found = [Requirement(line) for line in metadata.distribution(requirement.name).requires or []]
    extras = ["", *requirement.extras]
    return [one for one in found if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras)]


def missing_modules(installed: frozenset[str]) -> frozenset[str]:
    """Top-level modules of this environment that no distribution of `installed` provides."""
    providers = {module: map(canonicalize_name, names) for module, names in metadata.packages_distributions().items()}
    return frozenset(module for module, names in providers.items() if module not in OWN and installed.isdisjoint(names))


@asynccontextmanager
async def started(command: str, folder: pathlib.Path, *arguments: str) -> AsyncIterator[LocalProcess]:
    """`holdback COMMAND` in a process that has its own extra alone, once it listens."""
    missing = json.dumps(sorted(missing_modules(installed_by(command))))
    ports_file = folder / f"{command}.json"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCH, missing, command, "--ports-file", str(ports_file), *arguments
    )
    process = LocalProcess(command, child, ports_file)
    try:
        await process.wait_for_ports()
        yield process
    finally:
        status = await process.stop()
    assert status == 0


async def assert_lives_without_torch(process: LocalProcess) -> None:
    async with rpc.create_channel(f"127.0.0.1:{process.health_port}") as channel:
        stub: health_pb2_grpc.HealthAsyncStub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS), timeout=60, wait_for_ready=True)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    assert resident_bytes(process.child.pid) < MAX_IDLE_BYTES


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where the system has no /proc to read it from."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.parametrize("extra", ["scheduler", "gateway"])
def test_the_extra_installs_neither_torch_nor_what_comes_with_it(extra: str) -> None:
    assert installed_by(extra) & HEAVY == frozenset()
    assert missing_modules(installed_by(extra)) >= HEAVY


def test_the_executor_does_install_them() -> None:
    assert installed_by("executor") >= HEAVY


@pytest.mark.parametrize("command", ["scheduler", "replay"])
async def test_help_of_the_scheduler_needs_its_extra_alone(command: str) -> None:
    missing = json.dumps(sorted(missing_modules(installed_by("scheduler"))))
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", LAUNCH, missing, command, "--help")
    assert await child.wait() == 0


@pytest.mark.loopback
async def test_the_scheduler_starts_with_its_extra_alone(tmp_path: pathlib.Path) -> None:
    async with started("scheduler", tmp_path) as scheduler:
        await assert_lives_without_torch(scheduler)


@pytest.mark.loopback
async def test_the_gateway_starts_with_its_extra_alone(tmp_path: pathlib.Path) -> None:
    async with started("scheduler", tmp_path) as scheduler:
        flags = ["--scheduler", f"127.0.0.1:{scheduler.port}", "--served-model-name", "small"]
        tokenizer = save_directory(tmp_path / "tokenizer", make_tokenizer("byte_level"))
        async with started("gateway", tmp_path, *flags, "--tokenizer", str(tokenizer)) as gateway:
            await assert_lives_without_torch(gateway)


@pytest.mark.loopback
async def test_an_executor_without_its_extra_says_what_to_install(tmp_path: pathlib.Path) -> None:
    missing = json.dumps(sorted(missing_modules(installed_by("scheduler"))))
    arguments = ["executor", "--scheduler", "127.0.0.1:1", "--model", str(tmp_path), "--device", "cpu"]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LAUNCH, missing, *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, message = await child.communicate()
    assert child.returncode == 2
    assert "pip install 'holdback[executor]'" in message.decode()
