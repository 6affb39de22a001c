"""HTTPS alone where there is a certificate, files that are replaced under a running server, and whose calls count."""

from __future__ import annotations

import asyncio
import pathlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trustme

from gateway.server import GatewayServer
from holdback import AsyncClient, Tls, UnavailableError
from holdback.errors import ConfigError
from tests.gateway.conftest import http_url, wait_until_ready
from tests.gateway.scripted_scheduler import ScriptedScheduler

pytestmark = pytest.mark.loopback

EOS = 2
Make = Callable[..., Any]


class Files:
    """Certificate and key of a server for 127.0.0.1, and the authorities of its callers, where it looks for them."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.cert, self.key, self.client_ca = folder / "cert.pem", folder / "key.pem", folder / "client_ca.pem"

    def issue(self, *, cert: bool = True, key: bool = True) -> trustme.CA:
        """A new authority, and its certificate in place of the one before, or only a part of it."""
        authority = trustme.CA()
        issued = authority.issue_cert("127.0.0.1")
        if cert:
            issued.cert_chain_pems[0].write_to_path(str(self.cert))
        if key:
            issued.private_key_pem.write_to_path(str(self.key))
        return authority

    def trust(self, authority: trustme.CA) -> None:
        """From now on callers are those of this authority."""
        authority.cert_pem.write_to_path(str(self.client_ca))

    @property
    def settings(self) -> dict[str, pathlib.Path]:
        return {"tls_cert": self.cert, "tls_key": self.key}


@pytest.fixture
def files(tmp_path: pathlib.Path) -> Files:
    return Files(tmp_path)


def https_client(
    gateway: GatewayServer, authority: trustme.CA, caller: trustme.LeafCert | None = None
) -> httpx.AsyncClient:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if caller is not None:
        caller.configure_cert(context)
    url = http_url(gateway).replace("http://", "https://")
    return httpx.AsyncClient(base_url=url, verify=context, timeout=60, trust_env=False)


async def is_served(gateway: GatewayServer, authority: trustme.CA, caller: trustme.LeafCert | None = None) -> bool:
    """Whether a client that trusts this authority alone gets an answer."""
    async with https_client(gateway, authority, caller) as https:
        try:
            return (await https.get("/health/live")).status_code == 200
        except httpx.TransportError:
            return False


async def is_served_over_grpc(gateway: GatewayServer, authority: trustme.CA, folder: pathlib.Path) -> bool:
    ca = folder / "trusted.pem"
    authority.cert_pem.write_to_path(str(ca))
    async with AsyncClient(f"127.0.0.1:{gateway.port}", timeout_s=60, tls=Tls(ca=ca), max_retries=0) as client:
        try:
            return len(await client.models()) == 1
        except UnavailableError:
            return False


async def test_with_a_certificate_it_is_https_alone_and_a_renewed_one_is_taken(
    make_gateway: Make, scheduler: ScriptedScheduler, files: Files
) -> None:
    first = files.issue()
    gateway = await make_gateway(scheduler=scheduler.target, http_port=0, **files.settings)
    await wait_until_ready(gateway)
    async with https_client(gateway, first) as https:
        scheduler.answer = [EOS]
        assert (await https.post("/v1/completions", json={"prompt": "x", "stream": True})).status_code == 200
    async with httpx.AsyncClient(base_url=http_url(gateway), trust_env=False) as plain:
        with pytest.raises(httpx.TransportError):
            await plain.get("/health/live")
    second = files.issue()
    assert await is_served(gateway, second)
    assert not await is_served(gateway, first)


async def test_files_that_are_half_written_leave_the_ones_before_in_use(
    make_gateway: Make, scheduler: ScriptedScheduler, files: Files, tmp_path: pathlib.Path
) -> None:
    first = files.issue()
    gateway = await make_gateway(scheduler=scheduler.target, http_port=0, **files.settings)
    good_key = files.key.read_bytes()
    second = files.issue(key=False)
    for key in (good_key, b"", None):
        if key is None:
            files.key.unlink()
        else:
            files.key.write_bytes(key)
        assert await is_served(gateway, first)
        assert not await is_served(gateway, second)
        assert await is_served_over_grpc(gateway, first, tmp_path)
    third = files.issue()
    assert await is_served(gateway, third)
    assert await is_served_over_grpc(gateway, third, tmp_path)


async def test_callers_of_an_authority_that_was_taken_away_are_refused(
    make_gateway: Make, scheduler: ScriptedScheduler, files: Files
) -> None:
    server, old, new = files.issue(), trustme.CA(), trustme.CA()
    files.trust(old)
    gateway = await make_gateway(
        scheduler=scheduler.target, http_port=0, tls_client_ca=files.client_ca, **files.settings
    )
    old_caller, new_caller = old.issue_cert("a.example"), new.issue_cert("b.example")
    assert await is_served(gateway, server, old_caller)
    assert not await is_served(gateway, server, new_caller)
    assert not await is_served(gateway, server)
    files.trust(new)
    assert await is_served(gateway, server, new_caller)
    assert not await is_served(gateway, server, old_caller)


def visit(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLSession | None, bool]:
    """Asks for something; the session, and whether it was taken up again. Raises OSError when the server refuses."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as secure,
    ):
        secure.sendall(b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while chunk := secure.recv(65536):
            answer += chunk
        if not answer.startswith(b"HTTP/1.1 200"):
            raise OSError("no answer")
        return secure.session, bool(secure.session_reused)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_session_that_began_with_an_authority_ends_with_it(
    make_gateway: Make, scheduler: ScriptedScheduler, files: Files, version: ssl.TLSVersion
) -> None:
    server, old, new = files.issue(), trustme.CA(), trustme.CA()
    files.trust(old)
    gateway = await make_gateway(
        scheduler=scheduler.target, http_port=0, tls_client_ca=files.client_ca, **files.settings
    )
    context = ssl.create_default_context()
    context.maximum_version = version
    server.configure_trust(context)
    old.issue_cert("a.example").configure_cert(context)
    port = gateway.http.port
    session, _ = await asyncio.to_thread(visit, port, context)
    newer_session, is_resumed = await asyncio.to_thread(visit, port, context, session)
    assert not is_resumed or version is ssl.TLSVersion.TLSv1_2  # there it ends some time after it began
    files.trust(new)
    for known in (session, newer_session, None):
        with pytest.raises(OSError, match=r"alert|EOF|reset|no answer"):
            await asyncio.to_thread(visit, port, context, known)


def test_a_file_that_goes_away_while_it_is_read_is_named(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.issue()
    tls = Tls(files.cert, files.key, None, files.cert)
    monkeypatch.setattr(Tls, "check", lambda self: files.key.unlink(missing_ok=True))
    for read in (tls.server_credentials, tls.channel_credentials, tls.http_context):
        with pytest.raises(ConfigError, match="No such file"):
            read()
