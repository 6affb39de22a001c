"""The HTTP server of a gateway: uvicorn in the gateway's process and on its event loop.

Signals are the gateway's own business, and so is the log. While the gateway drains, the server still answers: requests
are refused with 503, and whoever asks for readiness is told. With `tls_cert` it speaks HTTPS, health and metrics
included; renewed certificates count from the next handshake on. Not covered: a client that sends its headers slower
than slowly holds one connection, no memory beyond 16 KiB, until it goes away.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial

import structlog
import uvicorn

from gateway.access import Access
from gateway.counts import HttpCounts
from gateway.generations import Generations
from gateway.openai.app import create_app
from gateway.openai.observing import MAX_HEADER_BYTES
from gateway.openai.protocol import HttpProtocol
from holdback.errors import ConfigError, InternalError
from holdback.tls import NO_TLS, Tls

log = structlog.get_logger(__name__)

BACKLOG = 2048
KEEP_ALIVE_S = 75
CUT_S = 1.0  # for answers to notice that their connection was cut
TICK_S = 1.0  # how often the date of responses is written anew


class HttpServer:
    """One HTTP server. `bind`, `start`, `stop`, on the gateway's event loop.

    Attributes:
        port: once bound.
    """

    def __init__(
        self,
        generations: Generations,
        access: Access,
        is_ready: Callable[[], bool],
        counts: HttpCounts,
        metrics: Callable[[], bytes],
        tls: Tls = NO_TLS,
    ) -> None:
        """Raises ConfigError for a file of `tls` that is none."""
        tls.check()
        self.port = 0
        config = uvicorn.Config(
            create_app(generations, access, is_ready, counts, metrics),
            http=partial(HttpProtocol, counts.count_request),  # type: ignore[arg-type]  # it is called like the class
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ssl_context_factory=None if tls.cert is None else lambda *_: _context_of(tls),
        )
        self._server = _Server(config)
        self._socket: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int) -> None:
        """Takes the port; 0 takes a free one. Raises ConfigError when it cannot."""
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)  # a port that is only bound may still be another's to listen on
        except OSError as error:
            listener.close()
            message = f"http_port is {port}, which cannot be bound on {host}: {error.strerror}"
            raise ConfigError(message) from error
        self._socket = listener
        self.port = listener.getsockname()[1]

    async def start(self) -> None:
        """Serves on the bound port. Raises what made the server end before it accepted a connection."""
        assert self._socket is not None, "bind comes first"  # noqa: S101
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        accepting = asyncio.create_task(self._server.accepting.wait())
        await asyncio.wait({accepting, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        accepting.cancel()
        if self._serving.done():
            await self._serving
            raise InternalError("the HTTP server ended before it began; its log says why")

    async def stop(self, grace_s: float) -> None:
        """Stops listening and returns once all responses are complete; what is left after `grace_s` is cut."""
        if self._serving is None:
            if self._socket is not None:
                self._socket.close()
            return
        self._server.end()
        _, left = await asyncio.wait({self._serving}, timeout=grace_s)
        if left:
            self._server.cut()
            _, left = await asyncio.wait(left, timeout=CUT_S)
        if left:
            self._serving.cancel()  # newer Pythons wait for TLS handshakes too, which may never end
            await asyncio.wait(left)
        if not self._serving.cancelled():
            self._serving.result()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, that ends when it is told and not a moment later."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()
        self._ended = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ended.set()

    def cut(self) -> None:
        """Ends what is left of connections: for what is still being answered on them, as clients that leave."""
        log.warning("http_connections_cut", num_connections=len(self.server_state.connections))
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._ended.wait()


def _context_of(tls: Tls) -> ssl.SSLContext:
    context = tls.http_context()
    assert context is not None, "a server without a certificate has no context"  # noqa: S101
    return context
