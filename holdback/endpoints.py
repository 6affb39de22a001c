"""The gateways that a client calls: their addresses, a channel to each, and whose turn it is."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import grpc
import grpc.aio
import pydantic

from holdback import rpc
from holdback.errors import InvalidArgumentError, RequestAbortedError
from holdback.forks import Owner
from holdback.tls import Tls
from holdback.v1 import inference_pb2_grpc

MAX_API_KEY_BYTES = 4096
_DNS = re.compile(r"dns:(//[^/]*/)?")
_HOST = re.compile(r"[^\s:/\[\]@]+|\[[0-9A-Fa-f:.]+(%[^\s\[\]]+)?\]")  # only an IPv6 address has colons, in brackets
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address with its channel; behind a name of the DNS there may be several gateways."""

    address: str
    tls: Tls
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceServiceAsyncStub

    @property
    def is_down(self) -> bool:
        """The last attempt to connect failed, and the time for the next one has not come."""
        return self.channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE


class Endpoints:
    """All addresses of one client.

    A channel belongs to the event loop on which it is made, so there are none before the first call: a client may be
    made before the loop runs.
    """

    def __init__(self, addresses: Sequence[str], tls: Tls) -> None:
        """Raises ConfigError for a file of `tls` that is none."""
        tls.check()
        self._addresses = addresses
        self._tls = tls
        self._all: list[Endpoint] = []
        self._turn = 0
        self._is_closed = False
        self._owner = Owner()

    def __iter__(self) -> Iterator[Endpoint]:
        """Raises RequestAbortedError once closed."""
        self._connect()
        return iter(self._all)

    def next(self) -> Endpoint:
        """Each in turn, those that are down only when all are. Raises RequestAbortedError once closed."""
        self._connect()
        in_order = self._all[self._turn :] + self._all[: self._turn]
        chosen = next((endpoint for endpoint in in_order if not endpoint.is_down), in_order[0])
        self._turn = (self._all.index(chosen) + 1) % len(self._all)
        return chosen

    async def close(self) -> None:
        """Does nothing to connections of another process, from which this one was forked."""
        self._is_closed = True
        for endpoint in self._all if self._owner.is_here else ():
            await endpoint.channel.close()

    def _connect(self) -> None:
        if self._is_closed:
            raise RequestAbortedError("the client is closed")
        if self._all:
            self._owner.check()
            return
        self._owner = Owner()
        self._all = [_connect(address, self._tls) for address in self._addresses]


def check_addresses(address: str | Sequence[str]) -> tuple[str, ...]:
    """The addresses of a client, each `host:port` or `dns:///name:port`. Raises InvalidArgumentError."""
    addresses = tuple(address) if isinstance(address, Sequence) and not isinstance(address, str) else (address,)
    if not addresses:
        raise InvalidArgumentError.of("address", "[]", "at least one address")
    for one in addresses:
        check_address(one)
    return addresses


def check_address(address: str) -> None:
    """gRPC itself would take port 65537 for port 1, and `http:` for a name of the DNS.

    Raises:
        InvalidArgumentError: it is none.
    """
    if isinstance(address, str):
        host, port = split_address(address)
        if _HOST.fullmatch(host) and re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65535:
            return
    limit = "host:port, [IPv6 address]:port or dns:///name:port, without http://, with a port in [1, 65535]"
    raise InvalidArgumentError.of("address", address, limit)


def _check_target(value: str) -> str:
    try:
        check_address(value)
    except InvalidArgumentError as error:
        raise ValueError(f"allowed: {error.limit}") from None
    return value


Target = Annotated[str, pydantic.AfterValidator(_check_target)]
"""Of a configuration: an address that `check_address` takes."""


def split_address(address: str) -> tuple[str, str]:
    """Host and port, without what stands before the name in an address of the DNS. IPv6 keeps its brackets."""
    host, _, port = _DNS.sub("", address, count=1).rpartition(":")
    return host, port


def is_loopback(address: str) -> bool:
    """Whether what is sent to an address stays on this machine."""
    host, _ = split_address(address)
    if _DNS.match(address) is not None:
        return False  # whatever the name resolves to
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def metadata_of(api_key: str | None, addresses: Sequence[str], tls: Tls, *, insecure: bool) -> Metadata:
    """What says who calls. Raises InvalidArgumentError, without the key, for a key that is none or would be exposed."""
    if api_key is None:
        return ()
    if not isinstance(api_key, str) or not re.fullmatch(r"[!-~]+", api_key) or len(api_key) > MAX_API_KEY_BYTES:
        limit = f"1 to {MAX_API_KEY_BYTES} printable ASCII characters without spaces"
        raise InvalidArgumentError(f"api_key is not shown here; allowed: {limit}", field="api_key", limit=limit)
    exposed = next((address for address in addresses if not is_loopback(address)), None)
    if tls.ca is None and exposed is not None and not insecure:
        limit = "with TLS, to a loopback address, or with insecure_api_key"
        raise InvalidArgumentError(
            f"api_key would be sent to {exposed} for all to read; allowed: {limit}", field="api_key", limit=limit
        )
    return (("authorization", f"Bearer {api_key}"),)


def _connect(address: str, tls: Tls) -> Endpoint:
    channel = rpc.create_channel(address, tls)
    return Endpoint(address, tls, channel, inference_pb2_grpc.InferenceServiceStub(channel))
