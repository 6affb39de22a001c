"""Only known keys may call, each as much at once as it may, and a change of the file counts at once."""

from __future__ import annotations

import asyncio
import hashlib
import pathlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import httpx
import pytest
import yaml

from gateway.access import ANYONE, KeyAccess, create_access
from gateway.cli import key
from gateway.server import GatewayServer
from holdback import rpc
from holdback.errors import (
    AlreadyExistsError,
    ConfigError,
    ErrorReason,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from holdback.v1 import inference_pb2, inference_pb2_grpc
from tests.gateway.conftest import http_url, wait_until_ready
from tests.gateway.scripted_scheduler import ScriptedScheduler

EOS = 2  # of the scripted model

Make = Callable[..., Awaitable[GatewayServer]]


def entry(secret: str, name: str, **limits: int) -> dict[str, Any]:
    return {"name": name, "sha256": hashlib.sha256(secret.encode()).hexdigest(), **limits}


def write(path: pathlib.Path, *entries: dict[str, Any]) -> pathlib.Path:
    """Replaces the file as an editor or a mounted secret does."""
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump({"keys": list(entries)}), encoding="utf-8")
    new.replace(path)
    return path


# ---- the file ----


def test_without_a_file_everybody_may_call() -> None:
    assert create_access(None).authenticate(None) == ANYONE


def test_a_known_key_is_its_caller(tmp_path: pathlib.Path) -> None:
    access = KeyAccess(write(tmp_path / "keys", entry("one", "a", max_requests=3), entry("two", "b")))
    assert access.authenticate("Bearer one").max_requests == 3
    assert access.authenticate("Bearer two").name == "b"


@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "bEaReR"])
def test_the_scheme_may_be_written_in_any_case_and_the_key_may_not(tmp_path: pathlib.Path, scheme: str) -> None:
    access = KeyAccess(write(tmp_path / "keys", entry("one", "a")))
    assert access.authenticate(f"{scheme} one").name == "a"
    assert refuses(access, f"{scheme} ONE")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "one", "Basic one", "Bearer three", "Bearer on"])
def test_any_other_header_is_refused_without_showing_it(tmp_path: pathlib.Path, header: str | None) -> None:
    access = KeyAccess(write(tmp_path / "keys", entry("one", "a")))
    with pytest.raises(UnauthenticatedError) as caught:
        access.authenticate(header)
    assert caught.value.reason is ErrorReason.UNAUTHENTICATED
    assert "three" not in caught.value.message


def refuses(access: KeyAccess, header: str) -> bool:
    try:
        access.authenticate(header)
    except UnauthenticatedError:
        return True
    return False


def test_a_change_counts_once_it_is_read(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "keys", entry("old", "a"))
    access = KeyAccess(path)
    write(path, entry("new", "a"))
    refuses(access, "Bearer new")  # or not, where it has been read by then
    access.wait_until_read()
    assert access.authenticate("Bearer new").name == "a"
    assert refuses(access, "Bearer old")


def test_thousands_of_keys_hold_no_call_up(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "keys", entry("old", "a"))
    access = KeyAccess(path)
    write_many(path, 3_000)
    began = time.thread_time()
    refuses(access, "Bearer old")
    access.wait_until_read()
    assert access.authenticate("Bearer 2999").name == "n2999"
    for _ in range(100):
        assert refuses(access, "Bearer none")
    assert time.thread_time() - began < 0.1  # some 0.003 s; to read here or to compare each key takes seconds


def write_many(path: pathlib.Path, num_keys: int) -> None:
    digests = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(num_keys)]
    lines = [f"  - name: n{number}\n    sha256: {digest}\n" for number, digest in enumerate(digests)]
    path.write_text("keys:\n" + "".join(lines), encoding="utf-8")


@pytest.mark.parametrize("content", ["keys: [", "keys: [{name: x}]", "nothing", ""])
def test_a_file_that_is_none_is_refused_at_start_and_leaves_the_keys_later(
    tmp_path: pathlib.Path, content: str
) -> None:
    path = write(tmp_path / "keys", entry("one", "a"))
    access = KeyAccess(path)
    path.write_text(content, encoding="utf-8")
    access.authenticate("Bearer one")
    access.wait_until_read()
    assert access.authenticate("Bearer one").name == "a"
    with pytest.raises(ConfigError, match="api_keys"):
        KeyAccess(path)
    path.unlink()
    access.authenticate("Bearer one")
    access.wait_until_read()
    assert access.authenticate("Bearer one").name == "a"


def test_a_key_in_place_of_its_digest_is_refused_and_not_shown(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "keys", {"name": "a", "sha256": "my-secret"})
    with pytest.raises(ConfigError) as caught:
        KeyAccess(path)
    assert "my-secret" not in caught.value.message
    assert "keys.0.sha256" in caught.value.message


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "the whole: a mapping is needed"),
        ("keys: x", "keys: a list is needed"),
        ("keys: [x]", r"keys\.0: a mapping is needed"),
    ],
)
def test_what_is_not_there_is_said_in_words(tmp_path: pathlib.Path, content: str, says: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{says}$"):
        KeyAccess(path)


@pytest.mark.parametrize("limit", [True, "2", 2.0, 0])
def test_a_limit_that_is_no_whole_number_is_refused(tmp_path: pathlib.Path, limit: Any) -> None:
    with pytest.raises(ConfigError, match=r"keys\.0\.max_streams"):
        KeyAccess(write(tmp_path / "keys", entry("one", "a", max_streams=limit)))


@pytest.mark.parametrize("twice", [{"name": "a"}, {"sha256": hashlib.sha256(b"one").hexdigest()}])
def test_a_name_or_key_that_stands_twice_is_refused(tmp_path: pathlib.Path, twice: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="stands twice"):
        KeyAccess(write(tmp_path / "keys", entry("one", "a"), entry("two", "b") | twice))


def test_the_command_draws_a_key_that_its_entry_knows(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key(["search"])
    first, rest = capsys.readouterr().out.split("\n", 1)
    access = KeyAccess(write(tmp_path / "keys", *yaml.safe_load(rest)))
    assert access.authenticate(f"Bearer {first.split()[-1]}").name == "search"


# ---- calls ----


class Caller:
    """A client with a key."""

    def __init__(self, gateway: GatewayServer, secret: str | None) -> None:
        self._metadata = [] if secret is None else [("authorization", f"Bearer {secret}")]
        self._channel = rpc.create_channel(f"127.0.0.1:{gateway.port}")
        self.stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Caller:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def models(self) -> int:
        return len((await self._done(self.stub.ListModels(inference_pb2.ListModelsRequest(), **self._options))).models)

    async def generate(self, **fields: Any) -> str:
        message = inference_pb2.Generation(text="x", **fields)
        request = inference_pb2.GenerateRequest(generation=message)
        return str((await self._done(self.stub.Generate(request, **self._options))).choices[0].text)

    async def start_stream(self, **fields: Any) -> Any:
        """What is left of a stream of which the first message has come."""
        message = inference_pb2.Generation(text="x", **fields)
        request = inference_pb2.GenerateStreamRequest(generation=message)
        stream = self.stub.GenerateStream(request, **self._options)
        events = aiter(stream)
        await self._done(anext(events))
        return events

    async def abort(self, request_id: str) -> None:
        await self._done(self.stub.Abort(inference_pb2.AbortRequest(request_id=request_id), **self._options))

    @property
    def _options(self) -> dict[str, Any]:
        return {"metadata": self._metadata, "timeout": 20}

    async def _done(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except grpc.aio.AioRpcError as failure:
            raise rpc.error_from_rpc(failure) from None


@pytest.fixture
async def guarded(make_gateway: Make, scheduler: ScriptedScheduler, tmp_path: pathlib.Path) -> GatewayServer:
    """A gateway that knows two keys: `one` may have two requests of which one is a stream, `two` has no limits."""
    path = write(tmp_path / "keys", entry("one", "a", max_requests=2, max_streams=1), entry("two", "b"))
    gateway = await make_gateway(scheduler=scheduler.target, api_keys=path)
    await wait_until_ready(gateway)
    return gateway


@pytest.mark.parametrize("secret", [None, "three"])
async def test_no_rpc_answers_without_a_known_key(guarded: GatewayServer, secret: str | None) -> None:
    async with Caller(guarded, secret) as caller:
        calls: list[Callable[[], Awaitable[Any]]] = [caller.models, caller.generate, caller.start_stream]
        for call in calls:
            with pytest.raises(UnauthenticatedError) as caught:
                await call()
            assert caught.value.reason is ErrorReason.UNAUTHENTICATED
    assert guarded._generations.num_errors["", ErrorReason.UNAUTHENTICATED] == len(calls)


async def test_a_call_without_a_key_is_refused_before_its_message_has_come(guarded: GatewayServer) -> None:
    async with rpc.create_channel(f"127.0.0.1:{guarded.port}") as channel:
        call: Any = channel.stream_unary("/holdback.v1.InferenceService/Generate")
        never = asyncio.Event()

        async def message_that_is_on_its_way() -> AsyncIterator[bytes]:
            await never.wait()
            yield b""

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(message_that_is_on_its_way(), timeout=60)
        assert isinstance(rpc.error_from_rpc(caught.value), UnauthenticatedError)


async def test_a_known_key_is_served(guarded: GatewayServer, scheduler: ScriptedScheduler) -> None:
    scheduler.answer = [EOS]
    async with Caller(guarded, "two") as caller:
        assert await caller.models() == 1
        assert await caller.generate() == ""


async def test_a_key_has_as_much_running_as_it_may_and_takes_nothing_from_others(
    guarded: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    async with Caller(guarded, "one") as one, Caller(guarded, "two") as two:
        stream = await one.start_stream()
        first = await scheduler.next_add()
        with pytest.raises(ResourceExhaustedError, match="max_streams") as caught:
            await one.start_stream()
        assert caught.value.reason is ErrorReason.KEY_LIMIT
        scheduler.answer = [EOS]
        await one.generate()
        others = [await two.start_stream() for _ in range(3)]
        scheduler.tokens(first.handle, 0, [EOS])
        assert [event.WhichOneof("event") async for event in stream][-1] == "finished"
        assert await one.start_stream() is not None
        assert others


async def test_a_key_aborts_its_own_requests_only(guarded: GatewayServer, scheduler: ScriptedScheduler) -> None:
    async with Caller(guarded, "one") as one, Caller(guarded, "two") as two:
        stream = await one.start_stream(request_id="mine")
        with pytest.raises(NotFoundError) as caught:
            await two.abort("mine")
        assert caught.value.reason is ErrorReason.REQUEST_NOT_FOUND
        assert scheduler.aborts.empty()
        await one.abort("mine")
        assert [event.WhichOneof("event") async for event in stream] == ["end", "finished"]


@pytest.mark.parametrize("request_id", ["same", "i" * 252])
async def test_keys_share_no_request_ids(guarded: GatewayServer, scheduler: ScriptedScheduler, request_id: str) -> None:
    async with Caller(guarded, "one") as one, Caller(guarded, "two") as two:
        first = await one.start_stream(request_id=request_id)
        second = await two.start_stream(request_id=request_id, n=2)
        ids = [(await scheduler.next_add()).spec.request_id for _ in range(3)]
        assert len(set(ids)) == 3
        assert max(map(len, ids)) <= 256
        with pytest.raises(AlreadyExistsError, match="alive"):
            await two.generate(request_id=request_id)
        await one.abort(request_id)
        assert [event.WhichOneof("event") async for event in first] == ["end", "finished"]
        await two.abort(request_id)
        assert [event.WhichOneof("event") async for event in second][-1] == "finished"


async def test_each_choice_counts_and_more_than_a_key_ever_allows_is_no_matter_of_waiting(
    guarded: GatewayServer, scheduler: ScriptedScheduler
) -> None:
    async with Caller(guarded, "one") as one:
        with pytest.raises(InvalidArgumentError, match=r"n is 3; allowed: at most 2 choices in all \(max_requests"):
            await one.generate(n=3)
        assert scheduler.adds.empty()
        stream = await one.start_stream()
        with pytest.raises(ResourceExhaustedError, match="has 1 requests running and asks for 2; allowed: 2"):
            await one.generate(n=2)
        await scheduler.next_add()
        scheduler.answer = [EOS]
        await one.generate()
        assert stream


async def test_a_list_of_prompts_that_a_key_never_allows_is_a_400(
    make_gateway: Make, scheduler: ScriptedScheduler, tmp_path: pathlib.Path
) -> None:
    path = write(tmp_path / "keys", entry("one", "a", max_requests=3, max_streams=1))
    gateway = await make_gateway(scheduler=scheduler.target, api_keys=path, http_port=0)
    await wait_until_ready(gateway)
    scheduler.answer = [EOS]
    headers = {"Authorization": "Bearer one"}
    async with httpx.AsyncClient(base_url=http_url(gateway), headers=headers, trust_env=False) as http:
        for wrong in ({"prompt": ["x"] * 4}, {"prompt": ["x"] * 2, "n": 2}, {"prompt": ["x"] * 2, "stream": True}):
            response = await http.post("/v1/completions", json=wrong)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
            assert "retry-after" not in response.headers
        assert scheduler.adds.empty()
        assert (await http.post("/v1/completions", json={"prompt": ["x"] * 3})).status_code == 200
