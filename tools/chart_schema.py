"""Keeps the settings of the processes in `k8s/chart/values.schema.json` equal to what the processes accept.

    python tools/chart_schema.py            writes them
    python tools/chart_schema.py --check    ends with 1 if they differ

What has a default in values.yaml is required: a null takes the default away, and so is refused by the key's name.

The chart hands `gateway.config`, `scheduler.config` and `config` of a group of executors to the processes as they are.
Their types and ranges come from the configuration classes of these; the rest of the schema is written by hand. Settings
that the chart decides itself are left out, so that they are refused in the values.
"""

import argparse
import json
import pathlib
import sys
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
    schema = config.model_json_schema()
    definitions = schema.get("$defs", {})
    properties = {
        name: resolve(value, definitions)
        for name, value in schema["properties"].items()
        if name not in DECIDED_BY_CHART
    }
    return {"type": "object", "additionalProperties": False, "properties": properties}


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
