"""`Client`: the same as `AsyncClient`, for plain threads."""

from __future__ import annotations

import contextlib
import gc
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdback import AsyncClient, Client, GenerationStream, SyncGenerationStream
from holdback.errors import InvalidArgumentError, NotFoundError, RequestAbortedError, UnavailableError
from holdback.sync_client import ClientSettings
from holdback.testing import Answer, MockGateway
from holdback.types import Usage

pytestmark = pytest.mark.loopback

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def gateway() -> Iterator[MockGateway]:
    with MockGateway() as gateway:
        yield gateway


@pytest.fixture
def client(gateway: MockGateway) -> Iterator[Client]:
    with Client(gateway.address, timeout_s=60) as client:
        yield client


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def background_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "holdback client"]


def test_it_has_all_that_the_asynchronous_one_has() -> None:
    assert public(Client) == public(AsyncClient)
    assert public(SyncGenerationStream) == public(GenerationStream) | {"num_resumes"}
    settings = set(inspect.signature(AsyncClient).parameters) - {"address"}
    assert set(ClientSettings.__annotations__) == settings
    for name in public(Client) - {"close"}:
        assert inspect.getdoc(getattr(Client, name)) == inspect.getdoc(getattr(AsyncClient, name))


def test_every_call_returns_what_it_should(gateway: MockGateway, client: Client) -> None:
    gateway.script(Answer("Hello"), Answer("Hello"))
    assert client.generate("Hi", max_tokens=3).text == "Hel"
    assert client.chat(HI).text == "Hello"
    assert client.tokenize("ab") == [97, 98]
    assert client.detokenize([97, 98]) == "ab"
    assert [model.name for model in client.models()] == [client.model().name] == ["mock"]
    with pytest.raises(NotFoundError):
        client.abort("nobody's")
    with pytest.raises(InvalidArgumentError, match="n is "):
        client.stream("Hi", n=-1)


def test_a_stream_is_an_iterator_and_tells_the_rest_on_itself(gateway: MockGateway, client: Client) -> None:
    gateway.script(Answer("a", "b", breaks_after=1), Answer("c"))
    stream = client.stream("Hi")
    assert [piece.text for piece in stream] == ["a", "b", ""]
    assert list(stream) == []
    assert (stream.model, stream.seed, stream.prompt_tokens, stream.num_resumes) == ("mock", 7, 2, 1)
    assert stream.request_id
    assert stream.usage == Usage(2, 2, 0)
    with client.chat_stream(HI) as chat:
        assert next(chat).text == "c"


@pytest.mark.parametrize("leave", ["close", "with", "break"])
def test_a_stream_that_is_left_ends_at_the_gateway(gateway: MockGateway, client: Client, leave: str) -> None:
    gateway.script(Answer("a", "b", delay_s=[0, 60]))
    stream = client.stream("Hi")
    if leave == "close":
        next(stream)
        stream.close()
    elif leave == "with":
        with stream:
            next(stream)
    else:
        for _ in stream:
            break
        del stream
    assert gateway.calls[0].ended.wait(60)


def test_threads_share_a_client(gateway: MockGateway, client: Client) -> None:
    gateway.script(*[Answer("a", "b")] * 32)
    with ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(lambda _: "".join(piece.text for piece in client.stream("Hi")), range(32)))
    assert texts == ["ab"] * 32


def test_closing_ends_the_calls_of_other_threads(gateway: MockGateway, client: Client) -> None:
    gateway.script(*[Answer("a", "b", delay_s=[0, 60])] * 2)
    stream = client.stream("Hi")
    next(stream)
    with ThreadPoolExecutor(2) as threads:
        next_piece, answer = threads.submit(next, stream), threads.submit(client.generate, "Hi")
        while len(gateway.calls) < 2:
            assert not answer.done()
        client.close()
        with pytest.raises(RequestAbortedError):
            next_piece.result(10)
        with pytest.raises(RequestAbortedError):
            answer.result(10)
    for use in (client.models, lambda: client.stream("Hi"), lambda: next(stream)):
        with pytest.raises(RequestAbortedError, match="closed"):
            use()
    client.close()


def test_no_thread_is_left_behind(gateway: MockGateway) -> None:
    before = background_threads()
    with Client(gateway.address) as client:
        client.models()
        assert len(background_threads()) == len(before) + 1
    dropped = Client(gateway.address)
    dropped.models()
    del dropped
    with pytest.raises(InvalidArgumentError):
        Client("nowhere")
    gc.collect()
    assert background_threads() == before


def test_a_stream_outlives_the_name_of_its_client(gateway: MockGateway) -> None:
    gateway.script(Answer("a", "b"))
    assert "".join(piece.text for piece in Client(gateway.address).stream("Hi")) == "ab"


def test_nobody_there_is_unavailable() -> None:
    with Client("127.0.0.1:1", max_retries=0) as client, pytest.raises(UnavailableError):
        client.models()


@pytest.mark.parametrize(
    "program",
    [
        "client = Client(address); client.models()",
        "client = Client(address); stream = client.stream('Hi'); print(next(stream).text)",
        "import threading; client = Client(address); stream = client.stream('Hi'); next(stream); "
        "threading.Thread(target=next, args=(stream,), daemon=True).start(); threading.excepthook = print",
    ],
)
def test_a_program_that_forgets_to_close_ends_without_a_word(gateway: MockGateway, program: str) -> None:
    gateway.script(Answer("a", "b", delay_s=[0, 60]))
    source = f"from holdback import Client; address = {gateway.address!r}; {program}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(call.ended.wait(60) for call in gateway.calls)


INTERRUPTED = """
import os, signal, sys, threading, time, traceback
from holdback import Client

def interrupt_when_it_waits(waiting=threading.get_ident()):
    # An interrupt of anything but the call itself is none of the client's business.
    while "result" not in [frame.name for frame in traceback.extract_stack(sys._current_frames()[waiting])]:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

stream = Client(sys.argv[1]).stream('Hi')
next(stream)
threading.Thread(target=interrupt_when_it_waits).start()
try: next(stream)
except KeyboardInterrupt: print('interrupted', flush=True); input()
"""


def test_an_interrupt_ends_the_call_at_the_gateway(gateway: MockGateway) -> None:
    gateway.script(Answer("a", "b", delay_s=[0, 60]))
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, gateway.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "interrupted\n"
        assert gateway.calls[0].ended.wait(60)  # while the program goes on
        child.communicate("\n", timeout=60)


def test_a_client_that_is_closed_under_its_calls_leaves_nothing_in_the_log_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with MockGateway(*[Answer(*"abcdefgh", delay_s=0.003)] * 50_000) as gateway, Client(gateway.address) as other:
        for _ in range(40):
            client = Client(gateway.address)
            readers = [threading.Thread(target=read_until_closed, args=(client,)) for _ in range(6)]
            for reader in readers:
                reader.start()
            other.generate("x")
            client.close()
            for reader in readers:
                reader.join(60)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def read_until_closed(client: Client) -> None:
    with contextlib.suppress(RequestAbortedError):
        while True:
            list(client.stream("x"))
