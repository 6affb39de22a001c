"""A name server on loopback whose addresses a test can change."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Self

HEADER_BYTES = 12
TYPE_A = 1
FLAGS = 0x8400  # an answer with authority, no error
NAME_POINTER = b"\xc0\x0c"  # to the name of the question


class NameServer(asyncio.DatagramProtocol):
    """Answers every question for IPv4 addresses with `addresses`, and any other with none.

    Attributes:
        port: of UDP on 127.0.0.1, once started.
        addresses: of every name.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self.port = 0
        self.addresses = addresses
        self._transport: asyncio.DatagramTransport | None = None

    def target(self, port: int) -> str:
        """The gRPC target of a name that has these addresses."""
        return f"dns://127.0.0.1:{self.port}/gateways.test:{port}"

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        self.port = self._transport.get_extra_info("sockname")[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._transport is not None
        self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        end = data.index(b"\0", HEADER_BYTES) + 5  # the name's last byte, two of the type, two of the class
        (kind,) = struct.unpack("!H", data[end - 4 : end - 2])
        addresses = self.addresses if kind == TYPE_A else ()
        header = data[:2] + struct.pack("!HHHHH", FLAGS, 1, len(addresses), 0, 0)
        records = [NAME_POINTER + struct.pack("!HHIH", TYPE_A, 1, 0, 4) + socket.inet_aton(one) for one in addresses]
        assert self._transport is not None
        self._transport.sendto(header + data[HEADER_BYTES:end] + b"".join(records), addr)
