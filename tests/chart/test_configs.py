"""Each rendered configuration is one that its process takes, with the values that were given."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
import yaml

from executor_svc.config import ExecutorConfig
from gateway.access import KeyAccess, create_access
from gateway.config import GatewayConfig
from holdback.config import ServiceConfig
from holdback.errors import ConfigError
from scheduler_svc.config import SchedulerServiceConfig
from tests.chart.rendering import CHART, EVERYTHING, EXAMPLES, ROOT, SMALL, Rendered, refusal, render
from tools import chart_schema
from tools.check_chart import KUBERNETES_VERSIONS

CONFIGS: dict[str, type[ServiceConfig]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerServiceConfig,
    "executor": ExecutorConfig,
}


def load_all(rendered: Rendered, folder: pathlib.Path) -> list[ServiceConfig]:
    """Every configuration, by the flag and with the variables that the pods have."""
    loaded = []
    for one in rendered.all("ConfigMap"):
        for file, text in one["data"].items():
            process = file.removesuffix(".yaml")
            if process not in CONFIGS:
                continue
            path = folder / f"{one['metadata']['name']}.yaml"
            path.write_text(text, encoding="utf-8")
            loaded.append(CONFIGS[process].load(["--config", str(path)], {}))
    return loaded


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_processes_take_the_configurations_of_every_example(example, tmp_path):
    assert len(load_all(render(files=[example]), tmp_path)) == 3


def test_the_processes_take_the_configurations_of_all_values_together(tmp_path):
    assert len(load_all(render(EVERYTHING), tmp_path)) == 8


def test_variables_of_the_pods_are_known_to_their_processes():
    for _, pod in render(EVERYTHING).pods():
        container = pod["containers"][0]
        variables = {one["name"]: "10.0.0.1" for one in container["env"] if one["name"].startswith("HOLDBACK_")}
        variables.pop("HOLDBACK_API_KEY", None)
        if container["args"][0] in CONFIGS:
            config = CONFIGS[container["args"][0]]
            prefix = f"HOLDBACK_{config.process.upper()}__"
            assert all(name.removeprefix(prefix).lower() in config.model_fields for name in variables)


def test_the_model_in_metrics_is_the_first_served_name_everywhere(tmp_path):
    rendered = render(SMALL)
    assert rendered.config("gateway")["pools"][0]["served_model_names"] == ["small-model", "alias"]
    assert rendered.config("scheduler")["served_model_name"] == "small-model"
    assert rendered.config("executor")["served_model_name"] == "small-model"


def test_all_processes_trace_to_one_endpoint_or_to_none():
    assert "otlp_endpoint" not in render(SMALL).config("gateway")
    rendered = render(SMALL, sets=["tracing.otlpEndpoint=http://collector:4317"])
    endpoints = {rendered.config(process)["otlp_endpoint"] for process in CONFIGS}
    assert endpoints == {"http://collector:4317"}


@pytest.mark.parametrize(
    ("endpoint", "is_taken"),
    [
        ("https://collector.traces.svc:4317", True),
        ("http://[fd00::1]:65535", True),
        ("http://[fd00::1]", True),
        ("http://collector", True),
        ("collector:4317", False),
        ("grpc://collector:4317", False),
        ("http://collector:4317/v1", False),
        ("http://col lector:4317", False),
        ("http://collector:0", False),
        ("http://collector:65536", False),
        ("http://collector:port", False),
    ],
)
def test_the_chart_takes_an_endpoint_of_traces_just_where_the_processes_do(endpoint, is_taken):
    values = f"{SMALL}\ntracing: {{otlpEndpoint: {json.dumps(endpoint)}}}\n"
    given = {"scheduler": "s:1", "device": "simulated", "otlp_endpoint": endpoint}
    if is_taken:
        assert ExecutorConfig.model_validate(given).otlp_endpoint == endpoint
        assert render(values).config("executor")["otlp_endpoint"] == endpoint
        return
    with pytest.raises(ValueError, match="otlp_endpoint"):
        ExecutorConfig.model_validate(given)
    assert endpoint in refusal(values)


def test_large_numbers_stay_whole(tmp_path):
    values = SMALL.replace(
        "{name: cpu}", "{name: cpu, config: {kv_cache_bytes: 4398046511104, simulated_decode_us: 60000000}}"
    )
    rendered = render(
        values,
        sets=[
            "poolDefaults.scheduler.config.max_num_queued_tokens=12345678901",
            "poolDefaults.scheduler.config.max_num_queued_reqs=1000000",
            "executorDefaults.autoscaling.targetQueuedPrefillTokens=100000000",
            "executorDefaults.autoscaling.type=hpa",
        ],
    )
    assert "4398046511104" in rendered.find("ConfigMap", "cpu")["data"]["executor.yaml"]
    _, scheduler, executor = sorted(load_all(rendered, tmp_path), key=lambda config: config.port)
    assert isinstance(scheduler, SchedulerServiceConfig)
    assert isinstance(executor, ExecutorConfig)
    assert scheduler.max_num_queued_tokens == 12345678901
    assert scheduler.max_num_queued_reqs == 1000000
    assert executor.kv_cache_bytes == 4398046511104
    target = rendered.find("HorizontalPodAutoscaler")["spec"]["metrics"][0]["external"]["target"]
    assert target["averageValue"] == "100000000"


def test_lists_and_values_of_pools_can_be_set_on_the_command_line(tmp_path):
    rendered = render(
        SMALL,
        sets=[
            "pools[0].executors[0].config.num_seqs_buckets={1,2,8}",
            "pools[0].executors[0].config.max_num_seqs=8",
            "pools[0].executors[0].config.num_batched_tokens_buckets[0]=128",
            "pools[0].servedModelNames={one,two}",
            "pools[0].scheduler.config.max_decode_stall_ms=null",
            "pools[0].executors[1].name=second",
        ],
    )
    executor = rendered.config("executor", "cpu")
    assert executor["num_seqs_buckets"] == [1, 2, 8]
    assert executor["num_batched_tokens_buckets"] == [128]
    assert rendered.config("executor", "second").keys() == render(SMALL).config("executor").keys()
    assert rendered.config("gateway")["pools"][0]["served_model_names"] == ["one", "two"]
    assert len(load_all(rendered, tmp_path)) == 4


def test_null_false_and_0_are_values_and_not_left_out(tmp_path):
    config = "{max_decode_stall_ms: null, default_max_tokens: null, async_scheduling: false, max_request_moves: 0}"
    rendered = render(SMALL.replace("executors:", f"scheduler: {{config: {config}}}\n    executors:"))
    scheduler = next(one for one in load_all(rendered, tmp_path) if isinstance(one, SchedulerServiceConfig))
    assert scheduler.max_decode_stall_ms is None
    assert scheduler.default_max_tokens is None
    assert scheduler.async_scheduling is False
    assert scheduler.max_request_moves == 0


def test_a_connection_of_a_gateway_may_live_for_ever(tmp_path):
    rendered = render(SMALL, sets=["gateway.config.max_connection_age_s=null"])
    (gateway,) = [one for one in load_all(rendered, tmp_path) if isinstance(one, GatewayConfig)]
    assert gateway.max_connection_age_s is None


def test_lists_in_the_schema_are_bounded_as_lists():
    settings = chart_schema.settings(ExecutorConfig)["properties"]["num_seqs_buckets"]
    (of_a_list,) = [one for one in settings["anyOf"] if one["type"] == "array"]
    assert {"minItems", "maxItems"} <= of_a_list.keys()
    assert not {"minLength", "maxLength"} & of_a_list.keys()


def test_the_settings_in_the_schema_are_those_of_the_processes():
    path = CHART / "values.schema.json"
    assert path.read_text(encoding="utf-8") == chart_schema.render(path), "run: make generate"


def test_what_goes_to_kubernetes_has_the_types_of_the_newest_one():
    """So that no field is refused that some Kubernetes of those has."""
    assert KUBERNETES_VERSIONS[-1] == chart_schema.KUBERNETES_VERSION
    types = chart_schema.kubernetes_types()
    assert {"effect", "operator"} <= types["kubernetes.Toleration"]["properties"].keys()
    assert types["kubernetes.Toleration"]["additionalProperties"] is False
    assert "description" not in json.dumps(types)


def test_every_setting_that_the_chart_decides_is_one_of_a_process():
    known = {name for config in CONFIGS.values() for name in config.model_fields}
    assert known >= chart_schema.DECIDED_BY_CHART


def test_the_file_of_keys_in_the_docs_is_one_that_a_gateway_takes(tmp_path):
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if one.startswith("keys:")]
    path = tmp_path / "keys.yaml"
    path.write_text(block, encoding="utf-8")
    assert isinstance(create_access(path), KeyAccess)
    (entry,) = yaml.safe_load(block)["keys"]
    table = text.partition("## API keys")[2].partition("## Bounds")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(entry)


def test_every_default_stands_in_the_values_and_no_key_is_only_there():
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert values["pools"] == []
    assert "enabled" not in values["tls"], "a choice that has no default"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_num_seqz: 3", "key 'max_num_seqz' is not known; did you mean 'max_num_seqs'?"),
        ("scheduler: here:1\nmax_num_seqs: [", "not YAML"),
        ("scheduler: here:1\ndevice: simulated\nmax_num_seqs: many", "max_num_seqs is 'many'"),
        ("scheduler: here:1\nport: 70000", "port is 70000"),
        ("max_num_seqs: 3\nmax_num_seqs: 4", "'max_num_seqs' stands twice"),
    ],
)
def test_a_process_says_which_key_of_its_file_is_wrong(text, words, tmp_path):
    path = tmp_path / "executor.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        ExecutorConfig.load(["--config", str(path)], {})
    assert words in str(refused.value)
