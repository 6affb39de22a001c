"""Configuration of every process: flags win over the environment, the environment over a YAML file.

A service declares one subclass of `ServiceConfig`; field names are the keys everywhere: `lease_timeout_s` in the file,
`--lease-timeout-s` as a flag, `HOLDBACK_SCHEDULER__LEASE_TIMEOUT_S` in the environment. A key that no field has is
refused in all three, and so is a value that its field's type or limits refuse.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import json
import os
import pathlib
import typing
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import pydantic
import yaml
from pydantic.fields import FieldInfo

from holdback.errors import ConfigError
from holdback.flags import FlagParser
from holdback.tls import Tls


class ServiceConfig(pydantic.BaseModel):
    """What every process has. `process` gives the environment prefix and the name of the command."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    process: ClassVar[str]

    host: str = pydantic.Field("127.0.0.1", description="address to listen on, a literal IP")
    port: int = pydantic.Field(0, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    health_port: int = pydantic.Field(0, ge=0, le=65535, description="port of grpc.health.v1; 0 takes a free one")
    metrics_port: int | None = pydantic.Field(
        None, ge=0, le=65535, description="port of /metrics, for Prometheus; 0 takes a free one, null: no such port"
    )
    tls_cert: pathlib.Path | None = pydantic.Field(
        None, description="PEM file with the certificate chain of this process, to serve with TLS"
    )
    tls_key: pathlib.Path | None = pydantic.Field(None, description="PEM file with its private key")
    tls_client_ca: pathlib.Path | None = pydantic.Field(
        None, description="PEM file with the authorities of those who may call; null: no certificate is asked for"
    )
    tls_ca: pathlib.Path | None = pydantic.Field(
        None, description="PEM file with the authorities of those that are called; null: they are called without TLS"
    )
    tls_server_name: str | None = pydantic.Field(
        None, min_length=1, max_length=253, description="name in their certificates; null: the address that is called"
    )
    insecure_bind: bool = pydantic.Field(False, description="allow an address other than loopback without TLS")
    log_level: Literal["debug", "info", "warning", "error"] = pydantic.Field(
        "info", description="least severe log line"
    )
    otlp_endpoint: str | None = pydantic.Field(
        None,
        pattern=r"^https?://[^/\s]+$",
        max_length=1024,
        description="where traces go, OTLP over gRPC, as http://HOST:PORT; null: as OTEL_EXPORTER_OTLP_ENDPOINT says, "
        "and without that there are none",
    )
    ports_file: pathlib.Path | None = pydantic.Field(
        None, description="file to write the ports to, as JSON, once the process listens"
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _no_boolean_is_a_number(cls, values: dict[str, Any]) -> dict[str, Any]:
        """To pydantic `true` of a file is the number 1."""
        for name, value in values.items():
            entries = value if isinstance(value, list) else [value]
            if name in cls.model_fields and True in map(_is_bool, entries) and not _takes_bool(cls.model_fields[name]):
                shown = json.dumps(value)
                raise ValueError(f"{name} is {shown}; allowed: no boolean")
        return values

    @pydantic.field_validator("otlp_endpoint")
    @classmethod
    def _port_that_there_can_be(cls, value: str | None) -> str | None:
        try:
            is_possible = value is None or urllib.parse.urlsplit(value).port != 0
        except ValueError:
            is_possible = False
        if not is_possible:
            raise ValueError("allowed: http://HOST:PORT or https://HOST:PORT, with a port in [1, 65535]")
        return value

    @pydantic.model_validator(mode="after")
    def _loopback_unless_told(self) -> Self:
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            raise ValueError(f"host is {self.host!r}; allowed: a literal IP address") from None
        if not address.is_loopback and self.tls_cert is None and not self.insecure_bind:
            raise ValueError(
                f"host is {self.host}, which is not loopback; allowed: with tls_cert and tls_key, or --insecure-bind"
            )
        return self

    @property
    def trace_endpoint(self) -> str | None:
        """Where traces go; None: there are none."""
        return self.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None

    @property
    def tls(self) -> Tls:
        """The TLS of this process. Its files have not been read."""
        return Tls(self.tls_cert, self.tls_key, self.tls_client_ca, self.tls_ca, self.tls_server_name)

    @classmethod
    def load(cls, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Self:
        """The configuration from flags, environment and the file of `--config`. Raises ConfigError."""
        flags = vars(cls._parser().parse_args(argv))
        config_file = flags.pop("config", None)
        merged = _from_file(config_file, cls) if config_file else {}
        merged |= _from_environment(os.environ if environment is None else environment, cls)
        merged |= flags
        try:
            return cls.model_validate(merged)
        except pydantic.ValidationError as error:
            raise ConfigError("; ".join(_sentence(problem) for problem in error.errors())) from None

    @classmethod
    def _parser(cls) -> argparse.ArgumentParser:
        parser = FlagParser(
            prog=f"holdback {cls.process}",
            argument_default=argparse.SUPPRESS,
            epilog=f"Each flag is an environment variable, too ({_prefix(cls)}LOG_LEVEL for --log-level), and a key of "
            "the file (log_level). Flags win over the environment, and that over the file.",
        )
        parser.add_argument("--config", metavar="FILE", help="YAML file with these keys, '-' written '_'")
        for name, info in cls.model_fields.items():
            flag = "--" + name.replace("_", "-")
            if info.annotation is bool:
                parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, help=_help(info))
            else:
                parser.add_argument(flag, dest=name, type=_parse_text, metavar="VALUE", help=_help(info))
        return parser


def _help(info: FieldInfo) -> str:
    """Description and default, where there is one to show, for argparse, which formats with %."""
    default = None if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
    text = info.description or ""
    return (text if default is None else f"{text} (default: {default})").replace("%", "%%")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _takes_bool(info: FieldInfo) -> bool:
    return info.annotation is bool or bool in typing.get_args(info.annotation)


def _parse_text(text: str) -> Any:
    """Lists and mappings are written as JSON, `a,b` is left to the field; everything else stays text for pydantic."""
    if text.startswith(("[", "{")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return None if text == "null" else text


_SafeLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, ten times as fast


class _UniqueKeyLoader(_SafeLoader):  # type: ignore[misc, valid-type]
    """YAML's safe loader, which besides refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: pathlib.Path, setting: str) -> Any:
    """What a YAML file holds. Raises ConfigError, which names the setting, for one that cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ConfigError(f"{setting} {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{setting} {path}: not YAML: {_yaml_problem(error)}") from None


def _yaml_problem(error: Exception) -> str:
    """In one line; PyYAML's own text quotes the file over several."""
    mark = getattr(error, "problem_mark", None)
    where = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
    return where + " ".join(str(getattr(error, "problem", None) or error).split())


def _from_file(path: str, cls: type[ServiceConfig]) -> dict[str, Any]:
    content = read_yaml(pathlib.Path(path), "--config")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: a mapping of keys to values is needed, not {type(content).__name__}")
    for key in content:
        _refuse_unknown(str(key), cls, f"--config {path}: key {key!r}")
    return {str(key): value for key, value in content.items()}


def _prefix(cls: type[ServiceConfig]) -> str:
    """How the names of its environment variables begin."""
    return f"HOLDBACK_{cls.process.upper()}__"


def _from_environment(environment: Mapping[str, str], cls: type[ServiceConfig]) -> dict[str, Any]:
    prefix = _prefix(cls)
    found: dict[str, Any] = {}
    for variable, value in environment.items():
        if variable.startswith(prefix):
            key = variable.removeprefix(prefix).lower()
            _refuse_unknown(key, cls, f"environment variable {variable}")
            found[key] = _parse_text(value)
    return found


def _refuse_unknown(key: str, cls: type[ServiceConfig], where: str) -> None:
    if key not in cls.model_fields:
        close = difflib.get_close_matches(key, cls.model_fields, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(cls.model_fields))}"
        raise ConfigError(f"{where} is not known; {hint}")


def _sentence(problem: Any) -> str:
    """One validation problem as `field is value; what is allowed`. Long values are cut to 100 characters."""
    # What is in brackets names pydantic's own alternatives of a type.
    field = ".".join(str(part) for part in problem["loc"] if "[" not in str(part))
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not field:
        return message
    if problem["type"] == "missing":
        return f"{field} is required"
    if problem["type"] == "extra_forbidden":
        return f"{field} is not known"
    shown = repr(problem["input"])
    if len(shown) > 100:
        shown = shown[:97] + "..."
    return f"{field} is {shown}; {message[0].lower()}{message[1:]}"
