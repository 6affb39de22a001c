"""What is said of an address where something else serves, or only one side has TLS."""

from __future__ import annotations

import asyncio
import contextlib
import io
import pathlib
import sys
from collections.abc import AsyncIterator

import pytest
import trustme

from holdback import AsyncClient, ConfigError, Tls, UnavailableError, rpc
from holdback.cli import main
from holdback.health import HealthServer

pytestmark = pytest.mark.loopback

NO_GATEWAY = "is no gateway's port; allowed: the one of its service, not of its health or metrics"


@pytest.fixture
async def health_address() -> AsyncIterator[str]:
    server = HealthServer("127.0.0.1", 0)
    yield f"127.0.0.1:{await server.start()}"
    await server.stop()


@pytest.fixture
def files(tmp_path: pathlib.Path) -> Tls:
    """All files of one process, those of who calls and of who is called."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    paths = [tmp_path / name for name in ("cert", "key", "ca")]
    for path, blob in zip(paths, (issued.cert_chain_pems[0], issued.private_key_pem, authority.cert_pem), strict=True):
        blob.write_to_path(path)
    cert, key, ca = paths
    return Tls(cert, key, ca, ca)


@contextlib.asynccontextmanager
async def serving(tls: Tls) -> AsyncIterator[str]:
    server = rpc.create_server()
    address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1', 0, tls)}"
    await server.start()
    yield address
    await server.stop(None)


async def use(client: AsyncClient, call: str) -> None:
    if call == "stream":
        await anext(client.stream("Hi"))
    elif call == "generate":
        await client.generate("Hi")
    else:
        await client.models()


@pytest.mark.parametrize("call", ["models", "generate", "stream"])
async def test_a_port_that_is_no_gateways_is_named(health_address: str, call: str) -> None:
    async with AsyncClient(health_address, timeout_s=60) as client:
        with pytest.raises(ConfigError) as caught:
            await use(client, call)
    assert caught.value.message == f"{health_address} {NO_GATEWAY}"


@pytest.mark.parametrize("command", ["generate Hi", "generate Hi --wait", "chat"])
async def test_a_command_for_such_a_port_was_called_wrongly(
    health_address: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert await asyncio.to_thread(main, [*command.split(), "--address", health_address]) == 2
    assert capsys.readouterr().err == f"holdback {command.split()[0]}: {health_address} {NO_GATEWAY}\n"


@pytest.mark.parametrize("call", ["models", "generate", "stream"])
async def test_a_connection_that_fails_for_want_of_tls_says_so(files: Tls, call: str) -> None:
    with_tls, mutual = Tls(files.cert, files.key), Tls(files.cert, files.key, files.client_ca)
    for server, client, hint in [
        (with_tls, Tls(), "; it may want TLS, and tls_ca is not set"),
        (mutual, Tls(ca=files.ca), "; it may want a certificate, and tls_cert is not set"),
        (Tls(), Tls(ca=files.ca), "; it speaks no TLS there, and tls_ca is set"),
    ]:
        async with serving(server) as address, AsyncClient(address, tls=client, max_retries=0) as caller:
            with pytest.raises(UnavailableError) as caught:
                await use(caller, call)
            assert caught.value.message.endswith(hint)


async def test_nobody_there_is_no_matter_of_tls() -> None:
    async with AsyncClient("127.0.0.1:1", max_retries=0) as client:
        with pytest.raises(UnavailableError) as caught:
            await client.models()
    assert caught.value.message.endswith("Connection refused")


@pytest.mark.parametrize(
    "command", [["state", "nohost"], ["timeline", "nohost"], ["generate", "hi", "--address", "nohost"]]
)
def test_an_address_that_is_none_is_a_wrong_call(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 2
    assert "address is 'nohost'; allowed: host:port" in capsys.readouterr().err
