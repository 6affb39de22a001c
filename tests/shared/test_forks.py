"""Clients in a process that is forked from the one that made them: refused where they cannot work, and left alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from holdback.testing import Answer, MockGateway

pytestmark = pytest.mark.loopback

# Each program forks itself. The child prints what it finds, and its status, with that of its end, stands below.
FORK = """
import asyncio, gc, os, sys, warnings
from holdback import AsyncClient, Client, RequestAbortedError
warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of every fork with threads

def fork(child):
    sys.stdout.flush()
    if process_id := os.fork():
        print("status", os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]))
    else:
        child()
        sys.exit(5)

def refused(use):
    try:
        use()
    except RequestAbortedError as error:
        print(error.message.replace(str(os.getppid()), "PARENT").replace(str(os.getpid()), "CHILD"))
"""
REFUSED = (
    "the client is that of process PARENT and does not work in process CHILD, which was forked from it; start processes"
    " with spawn, or fork before there is a client\n"
)


def run(program: str, *answers: Answer) -> str:
    """What a program prints, and nothing on standard error."""
    with MockGateway(*answers) as gateway:
        command = [sys.executable, "-c", FORK + program, gateway.address]
        # Without it gRPC's core starts threads in the child, which crash at times whatever the child does.
        variables = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "ERROR"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("child", "said"),
    [
        ("for use in (client.models, lambda: client.stream('Hi'), lambda: next(stream)): refused(use)", REFUSED * 3),
        ("client.close(); stream.close()", ""),
        ("global client, stream; del client, stream; gc.collect()", ""),
        ("pass", ""),
    ],
    ids=["use", "close", "collect", "exit"],
)
def test_a_blocking_client(child: str, said: str) -> None:
    program = f"""
client = Client(sys.argv[1], timeout_s=60)
stream = client.stream("Hi")
print(next(stream).text)
def child():
    {child}
fork(child)
print(next(stream).text, client.generate("Hi").text)
"""
    assert run(program, Answer("a", "b"), Answer("c")) == f"a\n{said}status 5\nb c\n"


def test_an_asynchronous_client_that_has_been_used() -> None:
    program = """
client = AsyncClient(sys.argv[1], timeout_s=60)
async def use(): print((await client.generate("Hi")).text)
loop = asyncio.new_event_loop()
loop.run_until_complete(use())
def child():
    refused(lambda: asyncio.run(use()))
    asyncio.run(client.close())
fork(child)
loop.run_until_complete(use())
loop.run_until_complete(client.close())
loop.close()
"""
    assert run(program, Answer("a"), Answer("b")) == f"a\n{REFUSED}status 5\nb\n"


def test_an_asynchronous_client_that_was_only_made_works_in_the_child() -> None:
    program = """
client = AsyncClient(sys.argv[1], timeout_s=60)
async def use():
    async with client: print((await client.generate("Hi")).text)
fork(lambda: asyncio.run(use()))
"""
    assert run(program, Answer("a")) == "a\nstatus 5\n"
