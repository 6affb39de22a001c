"""The ports file: how whoever starts a process with port 0 learns which ports it took."""

from __future__ import annotations

import json
import os
import pathlib

from holdback.errors import ConfigError


def write_ports_file(
    path: pathlib.Path,
    port: int,
    health_port: int,
    http_port: int | None = None,
    metrics_port: int | None = None,
) -> None:
    """Writes the ports as JSON, `{"port": ..., "health_port": ...}`. A reader finds no file or a whole one.

    Args:
        path: in a directory that exists; a file that is there is replaced.
        port: of the service.
        health_port: of `grpc.health.v1`.
        http_port: of the HTTP API; None leaves the key out.
        metrics_port: of the metrics; the same.

    Raises:
        ConfigError: the file cannot be written.
    """
    optional = {"http_port": http_port, "metrics_port": metrics_port}
    ports = {"port": port, "health_port": health_port} | {k: v for k, v in optional.items() if v is not None}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(ports), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"ports_file is {str(path)!r}, which cannot be written: {error.strerror}") from None
