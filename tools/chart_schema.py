"""Keeps what `k8s/chart/values.schema.json` has from elsewhere: settings of the processes, and Kubernetes' own types.

    python tools/chart_schema.py            writes them
    python tools/chart_schema.py --check    ends with 1 if they differ

What has a default in values.yaml is required: a null takes the default away, and so is refused by the key's name.

The chart hands `gateway.config`, `scheduler.config` and `config` of a group of executors to the processes as they are.
Their types and ranges come from the configuration classes of these. Settings that the chart decides itself are left
out, so that they are refused in the values. What the chart hands to Kubernetes as it is, such as tolerations, has the
types of the newest Kubernetes that the chart is made for, without descriptions. The rest is written by hand.
"""

import argparse
import importlib.resources
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from executor_svc.config import ExecutorConfig
from gateway.config import GatewayConfig
from holdback.config import ServiceConfig
from scheduler_svc.config import SchedulerServiceConfig

SCHEMA = pathlib.Path(__file__).resolve().parent.parent / "k8s" / "chart" / "values.schema.json"
VALUES = SCHEMA.with_name("values.yaml")

DECIDED_BY_CHART = {
    *("host", "port", "health_port", "http_port", "metrics_port", "otlp_endpoint", "insecure_bind", "ports_file"),
    *("tls_cert", "tls_key", "tls_client_ca", "tls_ca", "tls_server_name"),
    *("pools", "scheduler", "tokenizer", "served_model_name", "gateway_id", "api_keys"),
    *("executor_allowed_cidrs", "executor_id", "advertise_address"),
    *("device", "model", "tensor_parallel_size", "compile_cache", "kernels_directory", "compile_only", "neuron_cores"),
}
BOUNDS_OF_ARRAYS = {"minLength": "minItems", "maxLength": "maxItems"}
KUBERNETES_VERSION = "1.35"
KUBERNETES_PREFIX = "kubernetes."
# What the values have of Kubernetes' own, as its schemas call it; what these refer to comes with them.
KUBERNETES_TYPES = (
    *("io.k8s.api.core.v1.Affinity", "io.k8s.api.core.v1.Toleration", "io.k8s.api.core.v1.TopologySpreadConstraint"),
    *("io.k8s.api.core.v1.PodSecurityContext", "io.k8s.api.core.v1.SecurityContext", "io.k8s.api.core.v1.EnvVarSource"),
    *("io.k8s.api.core.v1.ResourceClaim", "io.k8s.api.core.v1.Volume"),
    *("io.k8s.api.networking.v1.NetworkPolicyPeer", "io.k8s.api.networking.v1.NetworkPolicyEgressRule"),
)
# Thirty kinds of volumes, of which only the names are worth their room here.
WITHOUT_PARTS = ("io.k8s.api.core.v1.Volume",)
# What Kubernetes checks beyond its schemas.
OF_FIELDS: dict[tuple[str, str], dict[str, Any]] = {
    ("Toleration", "operator"): {"enum": ["Exists", "Equal", "Lt", "Gt", None]},
    ("Toleration", "effect"): {"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute", None]},
    ("TopologySpreadConstraint", "whenUnsatisfiable"): {"enum": ["DoNotSchedule", "ScheduleAnyway"]},
    ("IPBlock", "cidr"): {"$ref": "#/$defs/network"},
}
CONFIGS: dict[str, type[ServiceConfig]] = {
    "gatewayConfig": GatewayConfig,
    "schedulerConfig": SchedulerServiceConfig,
    "executorConfig": ExecutorConfig,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    present, wanted = SCHEMA.read_text(encoding="utf-8"), render(SCHEMA)
    if present == wanted:
        return 0
    if is_check:
        print(f"{SCHEMA.name} is not what the configuration classes say; run: make generate", file=sys.stderr)
        return 1
    SCHEMA.write_text(wanted, encoding="utf-8")
    return 0


def render(path: pathlib.Path) -> str:
    """The schema at `path` with the processes' settings as they are now."""
    schema = json.loads(path.read_text(encoding="utf-8"))
    for name, config in CONFIGS.items():
        schema["$defs"][name] = settings(config)
    tracing = schema["properties"]["tracing"]["properties"]
    tracing["otlpEndpoint"] = settings_of(ServiceConfig)["otlp_endpoint"]["anyOf"][0]
    tracing["otlpEndpoint"]["pattern"] = or_empty(tracing["otlpEndpoint"]["pattern"])
    others = {name: value for name, value in schema["$defs"].items() if not name.startswith(KUBERNETES_PREFIX)}
    schema["$defs"] = others | kubernetes_types()
    require_defaults(schema, yaml.safe_load(VALUES.read_text(encoding="utf-8")))
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def require_defaults(schema: dict[str, Any], values: dict[str, Any]) -> None:
    """Requires each key that has a default; settings of the processes too, but not keys of Kubernetes' own mappings."""
    properties = schema.get("properties")
    is_config = schema.get("$ref", "").endswith("Config")
    if properties is None and not is_config:
        return
    schema.pop("required", None)
    if wanted := [key for key, value in values.items() if value is not None]:
        schema["required"] = wanted
    for key, value in values.items():
        if properties is not None and isinstance(value, dict):
            require_defaults(properties[key], value)


def settings(config: type[ServiceConfig]) -> dict[str, Any]:
    """A mapping of those settings of a process that the chart leaves to the values."""
    properties = {name: value for name, value in settings_of(config).items() if name not in DECIDED_BY_CHART}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings_of(config: type[ServiceConfig]) -> dict[str, Any]:
    """The schema of each of its settings."""
    schema = config.model_json_schema()
    return {name: resolve(value, schema.get("$defs", {})) for name, value in schema["properties"].items()}


def or_empty(pattern: str) -> str:
    """What takes an empty text too, which in the values stands for none."""
    return f"^({pattern.removeprefix('^').removesuffix('$')})?$"


def kubernetes_types() -> dict[str, Any]:
    """The types of Kubernetes that the values have, by the names that they have in the chart's schema."""
    folder = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    path = folder / f"v{KUBERNETES_VERSION}.0-local-strict" / "_definitions.json"
    definitions = json.loads(path.read_text(encoding="utf-8"))["$defs"]
    found: dict[str, Any] = {}
    wanted = list(KUBERNETES_TYPES)
    while wanted:
        name = wanted.pop()
        if short_name(name) not in found:
            definition = without_parts(definitions[name]) if name in WITHOUT_PARTS else definitions[name]
            wanted += references(definition)
            found[short_name(name)] = shorten(definition)
    for (name, field), more in OF_FIELDS.items():
        found[KUBERNETES_PREFIX + name]["properties"][field] |= more
    return dict(sorted(found.items()))


def short_name(name: str) -> str:
    return KUBERNETES_PREFIX + name.rpartition(".")[2]


def references(value: Any) -> Iterator[str]:
    """Names of the definitions that a definition refers to."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


def without_parts(definition: dict[str, Any]) -> dict[str, Any]:
    """Its keys, each of any content where it is a type of its own."""
    properties = {
        name: {"type": ["object", "null"]} if "$ref" in value else value
        for name, value in definition["properties"].items()
    }
    return definition | {"properties": properties}


def shorten(value: Any) -> Any:
    """Without descriptions and formats, and with references to the short names."""
    if isinstance(value, list):
        return [shorten(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: f"#/$defs/{short_name(item)}" if name == "$ref" else shorten(item)
        for name, item in value.items()
        if not (name in ("description", "format") and isinstance(item, str)) and not name.startswith("x-")
    }


def resolve(value: Any, definitions: dict[str, Any]) -> Any:
    """Without references, and without the titles that pydantic makes of names."""
    if isinstance(value, list):
        return [resolve(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        value = definitions[value["$ref"].rpartition("/")[2]] | {k: v for k, v in value.items() if k != "$ref"}
    resolved = {name: resolve(item, definitions) for name, item in value.items() if name not in ("title", "format")}
    if resolved.get("type") == "array":  # pydantic gives some arrays the bounds of a text
        resolved = {BOUNDS_OF_ARRAYS.get(name, name): item for name, item in resolved.items()}
    return resolved


if __name__ == "__main__":
    sys.exit(main())
