"""Commands of the scheduler service. Each imports what it needs, so that one does not pay for another."""

from __future__ import annotations

import argparse
import json


def replay(argv: list[str]) -> int:
    """`holdback replay TRACE`: runs a recorded trace through the scheduler and prints the result as JSON."""
    from scheduler_svc.replay import load_trace, replay_trace

    parser = argparse.ArgumentParser(prog="holdback replay", description="Run a recorded scheduler trace.")
    parser.add_argument("trace", metavar="TRACE", help="JSON file with the configuration and the events")
    print(json.dumps(replay_trace(load_trace(parser.parse_args(argv).trace))))
    return 0


def scheduler(argv: list[str]) -> int:
    """`holdback scheduler`: one scheduler until SIGTERM or Ctrl-C."""
    import asyncio

    from holdback.telemetry import configure_logging
    from scheduler_svc.config import SchedulerServiceConfig

    config = SchedulerServiceConfig.load(argv)
    configure_logging(config.process, config.log_level)

    from scheduler_svc.server import serve

    asyncio.run(serve(config))
    return 0
