"""Commands of the scheduler service. Each imports what it needs, so that one does not pay for another."""

from __future__ import annotations

import json
import pathlib

from holdback.flags import FlagParser


def replay(argv: list[str]) -> int:
    """`holdback replay TRACE`: runs a recorded trace through the scheduler and prints the result as JSON."""
    from scheduler_svc.replay import load_trace, replay_trace

    parser = FlagParser(prog="holdback replay", description="Run a recorded scheduler trace.")
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


def state(argv: list[str]) -> int:
    """`holdback state HOST:PORT`: shows what a scheduler's lanes run, and why the head of its queue waits."""
    import asyncio

    from google.protobuf import json_format

    from holdback.tls import add_client_flags, from_flags
    from holdback.v1 import scheduler_pb2
    from scheduler_svc.report import report
    from scheduler_svc.timeline import fetch

    parser = FlagParser(prog="holdback state", description=state.__doc__)
    parser.add_argument("scheduler", metavar="HOST:PORT", help="of the scheduler; holdback up prints it")
    parser.add_argument("--json", action="store_true", help="the whole answer of GetState, with the last step of each")
    add_client_flags(parser)
    flags = parser.parse_args(argv)
    request = scheduler_pb2.GetStateRequest(max_steps=1, without_rows=not flags.json)
    found = asyncio.run(fetch(flags.scheduler, request, from_flags(flags)))
    if flags.json:
        print(json_format.MessageToJson(found, preserving_proto_field_name=True))
    else:
        print("\n".join(report(found)))
    return 0


def timeline(argv: list[str]) -> int:
    """`holdback timeline HOST:PORT`: writes the last steps of a scheduler's lanes as a trace for Perfetto."""
    import asyncio

    from holdback.errors import ConfigError
    from holdback.tls import add_client_flags, from_flags
    from holdback.v1 import scheduler_pb2
    from scheduler_svc.timeline import fetch, trace

    parser = FlagParser(prog="holdback timeline", description=timeline.__doc__)
    parser.add_argument("scheduler", metavar="HOST:PORT", help="of the scheduler; holdback up prints it")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("timeline.json"), help="file (default: timeline.json)"
    )
    parser.add_argument("--steps", type=int, default=0, help="most steps of each lane (default: all that are kept)")
    add_client_flags(parser)
    flags = parser.parse_args(argv)
    if not 0 <= flags.steps < 2**32:
        raise ConfigError(f"--steps is {flags.steps}; allowed: [0, {2**32 - 1}]")
    request = scheduler_pb2.GetStateRequest(max_steps=flags.steps)
    found = asyncio.run(fetch(flags.scheduler, request, from_flags(flags)))
    try:
        flags.output.write_text(json.dumps(trace(found)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {flags.output}: {error.strerror}") from None
    num_steps = sum(len(lane.steps) for lane in found.lanes)
    print(f"{num_steps} steps of {len(found.lanes)} executors in {flags.output}; https://ui.perfetto.dev opens it")
    return 0
