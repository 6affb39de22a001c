"""Command of the gateway service."""

from __future__ import annotations

import asyncio

from gateway.config import GatewayConfig
from gateway.server import serve
from holdback.telemetry import configure_logging


def gateway(argv: list[str]) -> int:
    """`holdback gateway`: one gateway until SIGTERM or Ctrl-C."""
    config = GatewayConfig.load(argv)
    configure_logging(config.process, config.log_level)
    asyncio.run(serve(config))
    return 0
