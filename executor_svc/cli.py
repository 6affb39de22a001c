"""Commands of this package. Each imports what it needs itself, so that only the one called is loaded."""

from __future__ import annotations


def model(argv: list[str]) -> int:
    """`holdback model import SRC DEST`."""
    import pathlib

    from holdback.flags import FlagParser

    parser = FlagParser(prog="holdback model")
    importer = parser.add_subparsers(required=True, metavar="import").add_parser(
        "import", help="make a model directory from a GGUF file or a Hugging Face directory"
    )
    importer.add_argument("source", metavar="SRC", help="a GGUF file, a model directory, or package:NAME")
    importer.add_argument("destination", metavar="DEST", type=pathlib.Path, help="directory to make")
    importer.add_argument(
        "--dtype", default="float32", help="of the weights written: float32 (default), bfloat16 or float16"
    )
    arguments = parser.parse_args(argv)

    from executor_svc import model_import

    print(model_import.run(arguments.source, arguments.destination, arguments.dtype))
    return 0


def executor(argv: list[str]) -> int:
    """`holdback executor`: one executor, until SIGTERM or Ctrl-C; with `--compile-only`, until all is compiled."""
    import asyncio

    from executor_svc.config import ExecutorConfig
    from holdback.telemetry import configure_logging

    config = ExecutorConfig.load(argv)
    configure_logging("executor", config.log_level)
    if config.compile_only:
        from executor_svc.compile_only import compile_all

        print(compile_all(config))
        return 0
    from executor_svc.server import serve

    return asyncio.run(serve(config))
