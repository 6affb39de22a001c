"""The gateway as a process: its ports, its signals, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import json
import pathlib
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

from holdback import AsyncClient
from holdback.cli.local import LocalProcess
from holdback.errors import (
    ConfigError,
    ErrorReason,
    UnavailableError,
)
from tests.gateway.conftest import client_of
from tests.gateway.health import wait_for, watch
from tests.gateway.scripted_scheduler import ScriptedScheduler
from tests.gateway.small_tokenizers import make_tokenizer, save_directory
from tests.gateway.texts import EOS, collect, ids_of, text_of

pytestmark = pytest.mark.loopback

Make = Callable[..., Any]


@pytest.mark.parametrize("field", ["port", "health_port"])
async def test_a_port_in_use_is_named_also_by_another_gateway(
    make_gateway: Make, scheduler: ScriptedScheduler, field: str
) -> None:
    first = await make_gateway(scheduler=scheduler.target)
    taken = getattr(first, field)
    with pytest.raises(ConfigError, match=f"port is {taken}, which cannot be bound"):
        await make_gateway(scheduler=scheduler.target, **{field: taken})
    async with client_of(first) as client:
        assert len(await client.models()) == 1


async def test_a_name_of_two_pools_is_refused(make_gateway: Make, directory: pathlib.Path) -> None:
    pool = {"served_model_names": ["same"], "scheduler": "127.0.0.1:1", "tokenizer": directory}
    with pytest.raises(ConfigError, match="served_model_names has 'same' twice"):
        await make_gateway(pools=[pool, pool])


async def start_process(*arguments: str) -> asyncio.subprocess.Process:
    command = (sys.executable, "-m", "holdback.cli", "gateway", *arguments)
    return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)


@pytest.mark.case("B62")
async def test_the_process_reports_its_ports_drains_on_sigterm_and_exits_with_zero(
    directory: pathlib.Path, scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    ports_file = tmp_path / "ports.json"
    flags = ("--scheduler", scheduler.target, "--tokenizer", str(directory), "--ports-file", str(ports_file))
    child = await start_process(*flags)
    process = LocalProcess("gateway", child, ports_file)
    await asyncio.wait_for(process.wait_for_ports(), 60)
    readiness = watch(process.health_port)
    await wait_for(readiness, expected=True)
    async with AsyncClient(f"127.0.0.1:{process.port}", timeout_s=60, max_retries=0, max_resumes=0) as client:
        assert [model.name for model in await client.models()] == ["toy"]
        stream = client.stream("x")
        add = await scheduler.next_add()
        child.send_signal(signal.SIGTERM)
        await wait_for(readiness, expected=False)
        scheduler.tokens(add.handle, 0, [*ids_of("end"), EOS])
        assert text_of(await collect(stream)) == "end"
    assert child.stderr is not None
    log = (await asyncio.wait_for(child.stderr.read(), 60)).decode()
    assert await process.exited == 0
    events = [json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")]
    assert events[0] == "gateway_listens"
    assert events[-2:] == ["gateway_drains", "gateway_stopped"]


@pytest.mark.case("B62")
async def test_a_second_signal_ends_the_drain(
    directory: pathlib.Path, scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    ports_file = tmp_path / "ports.json"
    flags = ("--scheduler", scheduler.target, "--tokenizer", str(directory), "--ports-file", str(ports_file))
    process = LocalProcess("gateway", await start_process(*flags), ports_file)
    await asyncio.wait_for(process.wait_for_ports(), 60)
    readiness = watch(process.health_port)
    await wait_for(readiness, expected=True)
    async with AsyncClient(f"127.0.0.1:{process.port}", timeout_s=60, max_retries=0, max_resumes=0) as client:
        pending = asyncio.create_task(client.generate("x"))
        await scheduler.next_add()
        process.child.send_signal(signal.SIGTERM)
        await wait_for(readiness, expected=False)
        process.child.send_signal(signal.SIGINT)
        with pytest.raises(UnavailableError) as caught:
            await pending
        assert caught.value.reason is ErrorReason.SHUTTING_DOWN
    assert await asyncio.wait_for(process.exited, 60) == 0


ENDLESS_TOKENIZING = """
import sys, time
from gateway.tokenizer import Tokenizer
from holdback.cli import main

def encode(self, text):
    print("tokenizing", flush=True)
    time.sleep(3600)

Tokenizer._encode = encode
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.case("B62")
async def test_the_process_does_not_wait_for_a_text_that_is_tokenized_for_nobody(
    directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    ports_file = tmp_path / "ports.json"
    flags = ["gateway", "--scheduler", "127.0.0.1:1", "--tokenizer", str(directory), "--ports-file", str(ports_file)]
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENDLESS_TOKENIZING, *flags, "--drain-timeout-s", "0.1", stdout=pipe, stderr=pipe
    )
    process = LocalProcess("gateway", child, ports_file)
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        await asyncio.wait_for(process.wait_for_ports(), 60)
        async with AsyncClient(f"127.0.0.1:{process.port}", timeout_s=60, max_retries=0) as client:
            pending = asyncio.create_task(client.tokenize("x"))
            assert await asyncio.wait_for(child.stdout.readline(), 60) == b"tokenizing\n"
            child.send_signal(signal.SIGTERM)
            with pytest.raises(UnavailableError, match="the gateway stopped") as caught:
                await pending
        assert caught.value.reason is ErrorReason.SHUTTING_DOWN
        log = (await asyncio.wait_for(child.stderr.read(), 30)).decode()
        assert await asyncio.wait_for(process.exited, 30) == 0
    finally:
        if not process.exited.done():
            child.kill()
            await process.exited
    assert json.loads(log.splitlines()[-1])["event"] == "gateway_stopped"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tokenizer", "DIRECTORY"], "scheduler is not set; allowed: scheduler and tokenizer, or pools"),
        (["--scheduler", "x:1"], "tokenizer is not set; allowed: scheduler and tokenizer, or pools"),
        (
            ["--scheduler", "x:1", "--tokenizer", "/nonexistent"],
            "tokenizer is '/nonexistent'; allowed: a model directory",
        ),
        (["--scheduler", "x:1", "--tokenizer", "DIRECTORY", "--port", "TAKEN"], "port is TAKEN, which cannot be bound"),
        (["--scheduler", "x:1", "--tokenizer", "DIRECTORY", "--host", "0.0.0.0"], "allowed: with tls_cert and tls_key"),  # noqa: S104
        (["--drain-timeout-s", "-1"], "drain_timeout_s is '-1'"),
        (
            ["--scheduler", "x:1", "--pools", '[{"served_model_names":["a"],"scheduler":"x:1","tokenizer":"y"}]'],
            "both set",
        ),
    ],
)
async def test_a_process_that_cannot_start_says_why_and_exits_with_two(
    directory: pathlib.Path, flags: list[str], says: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        filled = [flag.replace("DIRECTORY", str(directory)).replace("TAKEN", port) for flag in flags]
        child = await start_process(*filled)
        _, message = await asyncio.wait_for(child.communicate(), 60)
    assert says.replace("TAKEN", port) in message.decode()
    assert child.returncode == 2


@pytest.mark.case("B72")
async def test_a_template_that_cannot_be_compiled_is_named_before_anything_is_served(tmp_path: pathlib.Path) -> None:
    tokenizer = make_tokenizer("byte_level")
    directory = save_directory(tmp_path / "evil", tokenizer, chat_template="{{ 'x' * 900000000 }}")
    flags = ("--scheduler", "127.0.0.1:1", "--tokenizer", str(directory), "--served-model-name", "evil")
    child = await start_process(*flags)
    _, message = await asyncio.wait_for(child.communicate(), 60)
    assert f"model 'evil' in '{directory}': the chat template cannot be read: MemoryError" in message.decode()
    assert "gateway_listens" not in message.decode()
    assert child.returncode == 2


async def test_the_default_name_of_a_model_is_that_of_its_directory(
    make_gateway: Make, scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    directory = save_directory(tmp_path / "some-model", make_tokenizer("byte_level"))
    gateway = await make_gateway(scheduler=scheduler.target, tokenizer=directory, served_model_name="")
    assert [pool.names for pool in gateway.pools] == [("some-model",)]


async def test_the_pools_of_a_gateway_share_their_threads_so_that_the_longest_texts_have_one_place_in_all(
    make_gateway: Make, directory: pathlib.Path
) -> None:
    pools = [
        {"served_model_names": [name], "scheduler": "127.0.0.1:1", "tokenizer": directory} for name in ("one", "two")
    ]
    gateway = await make_gateway(pools=pools)
    first, second = gateway.pools
    assert first.tokenizer._threads is second.tokenizer._threads
