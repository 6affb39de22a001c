"""TLS on every hop: who a process is, whom it trusts, and who may call it.

One set of files serves a process as server and as client. A server with `client_ca` asks callers for a certificate of
that authority (mutual TLS). Files are read again when they change: a server takes new ones with the next handshake, and
whoever dials reads them for each channel, so that certificates can be renewed under running processes.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import ssl
from dataclasses import dataclass
from typing import Any

import grpc

from holdback.errors import ConfigError

Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files; all None is no TLS.

    Attributes:
        cert: chain of this process, its own certificate first.
        key: private key of `cert`.
        client_ca: authorities of those who may call; None asks for no certificate.
        ca: authorities of those that this process calls; None calls without TLS.
        server_name: that the certificates of those must have, in place of the address dialled.
    """

    cert: pathlib.Path | None = None
    key: pathlib.Path | None = None
    client_ca: pathlib.Path | None = None
    ca: pathlib.Path | None = None
    server_name: str | None = None

    def check(self) -> None:
        """Reads all files. Raises ConfigError, which names the setting, for one that is missing or no PEM."""
        if (self.cert is None) != (self.key is None):
            missing, given = ("tls_key", "tls_cert") if self.key is None else ("tls_cert", "tls_key")
            raise ConfigError(f"{missing} is not set, but {given} is; allowed: both or none")
        if self.client_ca is not None and self.cert is None:
            raise ConfigError("tls_client_ca is set, but tls_cert is not; allowed: only together")
        if self.server_name is not None and self.ca is None:
            raise ConfigError("tls_server_name is set, but tls_ca is not; allowed: only together")
        if self.cert is not None and self.key is not None:
            _check_chain(self.cert, self.key)
        for setting, path in (("tls_client_ca", self.client_ca), ("tls_ca", self.ca)):
            if path is not None:
                _check_authorities(setting, path)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """What a server listens with; None without TLS. Raises ConfigError as `check`."""
        self.check()
        if self.cert is None:
            return None
        last_stamp = self.stamp()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal last_stamp
            stamp = self.stamp()
            if stamp == last_stamp:
                return None  # those in use are good
            try:
                self.check()
                configuration = self._server_configuration()
            except ConfigError:
                return None  # half written; the next handshake looks again
            last_stamp = stamp
            return configuration

        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(),
            fetch,  # type: ignore[arg-type]  # None is allowed, and says that nothing changed
            require_client_authentication=self.client_ca is not None,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """What a channel dials with; None without TLS. Raises ConfigError as `check`."""
        self.check()
        if self.ca is None:
            return None
        return grpc.ssl_channel_credentials(
            _read("tls_ca", self.ca), _read("tls_key", self.key), _read("tls_cert", self.cert)
        )

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        pair = (_read("tls_key", self.key) or b"", _read("tls_cert", self.cert) or b"")
        return grpc.ssl_server_certificate_configuration([pair], _read("tls_client_ca", self.client_ca))

    def http_context(self) -> ssl.SSLContext | None:
        """What an HTTP server listens with; None without a certificate. Raises ConfigError as `check`."""
        return None if self.cert is None else _NewestContext.of(self)

    def context_of_files(self) -> ssl.SSLContext:
        """A server's context of the files as they are now, for a `Tls` with `cert`. Raises ConfigError as `check`."""
        self.check()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.cert or "", self.key)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
                # A session that is taken up again shows no certificate, and its ticket is renewed each time: one that
                # has run out meanwhile would be good for ever.
                context.num_tickets = 0
                context.options |= ssl.OP_NO_TICKET
        except OSError as error:  # they were well a moment ago
            raise ConfigError(f"tls_cert {self.cert}: {error.strerror}") from None
        return context

    def stamp(self) -> Stamp:
        """Changes when a file does."""
        paths = (self.cert, self.key, self.client_ca, self.ca)
        return tuple(_stamp_of(path) for path in paths if path is not None)


class _NewestContext(ssl.SSLContext):
    """Begins each connection with a context of the newest files, and only looks itself like a context.

    Each generation of files has a new one: one that has been given files keeps authorities that are no longer in them,
    loses its key to a certificate that came before its own, and takes up sessions that began with other authorities.
    """

    _tls: Tls
    _newest: ssl.SSLContext
    _stamp: Stamp

    @classmethod
    def of(cls, tls: Tls) -> _NewestContext:
        """Raises ConfigError as `Tls.check`."""
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._tls, context._newest, context._stamp = tls, tls.context_of_files(), tls.stamp()
        return context

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        """What asyncio asks for with each connection."""
        stamp = self._tls.stamp()
        if stamp != self._stamp:
            with contextlib.suppress(ConfigError):  # half written; the next connection looks again
                self._newest, self._stamp = self._tls.context_of_files(), stamp
        return self._newest.wrap_bio(*arguments, **options)


NO_TLS = Tls()


def add_client_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a command that calls a server; `from_flags` reads them."""
    group = parser.add_argument_group("TLS")
    group.add_argument("--tls-ca", type=pathlib.Path, metavar="FILE", help="authorities of the server; without: no TLS")
    group.add_argument("--tls-cert", type=pathlib.Path, metavar="FILE", help="own certificate, where one is asked for")
    group.add_argument("--tls-key", type=pathlib.Path, metavar="FILE", help="its private key")
    group.add_argument("--tls-server-name", metavar="NAME", help="name in the server's certificate")


def from_flags(flags: argparse.Namespace) -> Tls:
    """Raises ConfigError as `Tls.check`."""
    tls = Tls(flags.tls_cert, flags.tls_key, None, flags.tls_ca, flags.tls_server_name)
    tls.check()
    return tls


def _read(setting: str, path: pathlib.Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting} {path}: {error.strerror}") from None


def _stamp_of(path: pathlib.Path) -> tuple[int, int, int] | None:
    """None while there is no such file, as for a moment when it is replaced."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _check_chain(cert: pathlib.Path, key: pathlib.Path) -> None:
    for setting, path in (("tls_cert", cert), ("tls_key", key)):
        _read(setting, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        raise ConfigError(f"tls_cert {cert} and tls_key {key}: no certificate with its key: {error.reason}") from None


def _check_authorities(setting: str, path: pathlib.Path) -> None:
    _read(setting, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{setting} {path}: no PEM certificates: {error.reason}") from None


def _no_password() -> str:
    raise ConfigError("tls_key is encrypted; allowed: a key without password")
