"""TLS on all three hops, the dial-back to executors included, over IPv4 and IPv6, whatever the environment's proxy."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import pytest
import trustme

from holdback import AsyncClient, ConfigError, Tls, UnavailableError
from holdback.cli import main
from holdback.cli.local import LocalStack

pytestmark = pytest.mark.loopback


class Files:
    """PEM files of one authority and of certificates that it signs."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.ca))

    def issue(self, name: str, *identities: str) -> tuple[pathlib.Path, pathlib.Path]:
        """A chain and its key for these host names or addresses."""
        chain, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        issued = self._authority.issue_cert(*identities)
        issued.private_key_pem.write_to_path(str(key))
        chain.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        return chain, key


@pytest.fixture
def files(tmp_path: pathlib.Path) -> Files:
    return Files(tmp_path)


def with_tls(arguments: Mapping[str, Sequence[str]], files: Files, *identities: str) -> dict[str, list[str]]:
    """Every process with a certificate of its own, and mutual TLS on every hop."""
    secured = {}
    for command in ("scheduler", "executor", "gateway"):
        chain, key = files.issue(command, *identities)
        flags = ["--tls-cert", chain, "--tls-key", key, "--tls-client-ca", files.ca, "--tls-ca", files.ca]
        secured[command] = [*arguments.get(command, ()), *map(str, flags)]
    return secured


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_pool_serves_with_mutual_tls_on_every_hop(
    host: str, files: Files, stack_arguments: Mapping[str, Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    chain, key = files.issue("client", "client")
    client_tls = Tls(chain, key, ca=files.ca)
    async with LocalStack(with_tls(stack_arguments, files, host), host=host) as stack:
        await stack.wait_until_ready()
        async with AsyncClient(stack.gateway_address, timeout_s=60, tls=client_tls) as client:
            answer = await client.generate(token_ids=[20, 21, 22], max_tokens=4)
            assert len(answer.token_ids) == 4
        for refused in (Tls(ca=files.ca), Tls()):  # no certificate, and no TLS at all
            async with AsyncClient(stack.gateway_address, timeout_s=60, tls=refused) as client:
                with pytest.raises(UnavailableError):
                    await client.models()


async def test_a_certificate_of_another_name_is_refused_unless_the_name_is_given(
    files: Files, stack_arguments: Mapping[str, Sequence[str]]
) -> None:
    arguments = with_tls(stack_arguments, files, "holdback.internal")
    for command in ("executor", "gateway", "scheduler"):
        arguments[command] += ["--tls-server-name", "holdback.internal"]
    chain, key = files.issue("client", "client")
    async with LocalStack(arguments) as stack:
        await stack.wait_until_ready()
        named = Tls(chain, key, ca=files.ca, server_name="holdback.internal")
        async with AsyncClient(stack.gateway_address, timeout_s=60, tls=named) as client:
            assert len(await client.models()) == 1
        async with AsyncClient(stack.gateway_address, timeout_s=60, tls=Tls(chain, key, ca=files.ca)) as client:
            with pytest.raises(UnavailableError):
                await client.models()


def test_files_that_do_not_fit_are_one_sentence_at_start(
    files: Files, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain, key = map(str, files.issue("one", "localhost"))
    _, other_key = map(str, files.issue("two", "localhost"))
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("no certificate")
    for flags, words in {
        ("--tls-cert", chain): "tls_key is not set",
        ("--tls-cert", chain, "--tls-key", other_key): "no certificate with its key",
        ("--tls-cert", str(tmp_path / "none"), "--tls-key", key): "No such file",
        ("--tls-cert", chain, "--tls-key", key, "--tls-client-ca", str(no_pem)): "no PEM certificates",
        ("--tls-client-ca", str(files.ca)): "tls_client_ca is set, but tls_cert is not",
        ("--tls-server-name", "x"): "tls_server_name is set, but tls_ca is not",
    }.items():
        assert main(["scheduler", *flags]) == 2
        assert words in capsys.readouterr().err


def test_an_address_that_is_not_loopback_needs_tls_or_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler", "--host", "0.0.0.0"]) == 2  # noqa: S104
    assert "with tls_cert and tls_key, or --insecure-bind" in capsys.readouterr().err


async def test_a_server_takes_up_a_renewed_certificate(
    files: Files, tmp_path: pathlib.Path, stack_arguments: Mapping[str, Sequence[str]]
) -> None:
    arguments = {command: list(flags) for command, flags in stack_arguments.items()}
    chain, key = files.issue("gateway", "127.0.0.1")
    arguments["gateway"] += ["--tls-cert", str(chain), "--tls-key", str(key)]
    async with LocalStack(arguments) as stack:
        await stack.wait_until_ready()
        async with AsyncClient(stack.gateway_address, timeout_s=20, tls=Tls(ca=files.ca)) as client:
            assert len(await client.models()) == 1
        renewed = Files(tmp_path)  # another authority, so that the old certificate would not do
        for old, new in zip((chain, key), renewed.issue("new", "127.0.0.1"), strict=True):
            new.replace(old)
        async with AsyncClient(stack.gateway_address, timeout_s=20, tls=Tls(ca=renewed.ca)) as client:
            assert len(await client.models()) == 1


def test_a_client_with_files_that_are_none_says_so(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="tls_ca"):
        Tls(ca=tmp_path / "none").check()
