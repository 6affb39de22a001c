"""Commands of the gateway service. Each imports what it needs itself, so that only the one called is loaded."""

from __future__ import annotations


def gateway(argv: list[str]) -> int:
    """`holdback gateway`: one gateway until SIGTERM or Ctrl-C."""
    import asyncio
    import contextlib
    import logging
    import os
    import sys

    from gateway.config import GatewayConfig
    from gateway.server import serve
    from holdback.telemetry import configure_logging

    config = GatewayConfig.load(argv)
    configure_logging(config.process, config.log_level)
    asyncio.run(serve(config))
    # Everything has ended in order. What may still run is a thread that tokenizes for nobody. It cannot be stopped, the
    # interpreter would wait for it, and as a daemon it might be cut off within the tokenizer's own code.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # who read it is gone
            stream.flush()
    os._exit(0)


def key(argv: list[str]) -> int:
    """`holdback key NAME`: draws an API key, and prints it with its entry for the gateway's file of keys."""
    import hashlib
    import secrets

    from holdback.flags import FlagParser

    parser = FlagParser(prog="holdback key", description=key.__doc__)
    parser.add_argument("name", metavar="NAME", help="whose it is, for logs and limits")
    name = parser.parse_args(argv).name
    secret = f"hb-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(secret.encode()).hexdigest()
    print(f"# The key itself, which is kept nowhere: {secret}\n- name: {name}\n  sha256: {digest}")
    return 0
