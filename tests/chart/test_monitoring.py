"""Dashboard and alerts ask for series that there are, with labels that they have, and say what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import yaml

from executor_svc.config import ExecutorConfig
from executor_svc.metrics import ExecutorMetrics
from holdback.errors import ErrorReason
from tests.chart.rendering import CHART, ROOT, SMALL, Rendered, refusal, render

ADDED_BY_PROMETHEUS = {"namespace", "pod", "le"}
SERIES = re.compile(r"((?:holdback|vllm|vllm_neuron):\w+?)(_bucket|_sum|_count)?(?![\w:])(?:\{([^}]*)\})?")
DASHBOARD = CHART / "dashboards" / "holdback.json"
ON = ["metrics.podMonitor.enabled=true", "metrics.dashboard.enabled=true", "metrics.alerts.enabled=true"]


@pytest.fixture(scope="session")
def monitored() -> Rendered:
    return render(SMALL, sets=ON)


@pytest.fixture(scope="session")
def documented() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of each metric of docs/metrics.md."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w:]+)` \| (\w+) \| ([^|]*) \|", text, re.MULTILINE)
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def expressions() -> Iterator[tuple[str, str]]:
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for group in render(SMALL, sets=ON).find("PrometheusRule")["spec"]["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def test_every_series_that_is_asked_for_is_documented_with_its_labels(documented):
    num_series = 0
    for where, expression in expressions():
        for name, suffix, matchers in SERIES.findall(expression):
            kind, labels = documented[name]
            assert (kind == "histogram") == bool(suffix), f"{where}: {name}{suffix}"
            assert set(re.findall(r"(\w+)[=!]", matchers)) <= labels | ADDED_BY_PROMETHEUS, f"{where}: {name}"
            num_series += 1
        for grouped in re.findall(r"by \(([^)]*)\)", expression):
            used = {label.strip() for label in grouped.split(",")}
            known = set().union(*(documented[name][1] for name, _, _ in SERIES.findall(expression)))
            assert used <= known | ADDED_BY_PROMETHEUS, f"{where}: by ({grouped})"
    assert num_series > 40


def test_expressions_close_what_they_open():
    for where, expression in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), where
        assert expression.count('"') % 2 == 0, where


def test_counters_are_asked_for_as_rates(documented):
    for where, expression in expressions():
        for name, _, _ in SERIES.findall(expression):
            if documented[name][0] == "counter" and name != "holdback:compile_cache_misses_total":
                assert re.search(rf"(rate|increase)\({name}", expression), f"{where}: {name}"


def test_the_errors_that_alerts_watch_are_reasons_whose_series_are_there_from_the_start():
    """Of others the first one would be no increase."""
    watched = set()
    for _, expression in expressions():
        for reasons in re.findall(r'reason=~?"([^"]*)"', expression):
            watched |= set(reasons.split("|"))
    assert {"INTERNAL", "QUEUE_FULL"} <= watched <= {reason.value for reason in ErrorReason}


def test_every_alert_has_its_paragraph_in_the_operations_page():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    alerts = [rule["alert"] for rule in render(SMALL, sets=ON).find("PrometheusRule")["spec"]["groups"][0]["rules"]]
    assert re.findall(r"^\| `(Holdback\w+)` \|", text, re.MULTILINE) == alerts


def test_alerts_watch_the_namespace_of_the_release_with_the_thresholds_that_were_given(monitored):
    rules = {rule["alert"]: rule for rule in monitored.find("PrometheusRule")["spec"]["groups"][0]["rules"]}
    assert all('namespace="serving"' in rule["expr"] for rule in rules.values())
    assert "{{ $labels.model_name }}" in rules["HoldbackNoExecutor"]["annotations"]["summary"]
    own = render(SMALL, sets=[*ON, "metrics.alerts.queueWaitSeconds=7"])
    (rule,) = [
        rule
        for rule in own.find("PrometheusRule")["spec"]["groups"][0]["rules"]
        if rule["alert"] == "HoldbackQueueWaits"
    ]
    assert rule["expr"].endswith("> 7")


def test_an_executor_that_still_starts_is_not_told_to_be_unregistered(monitored, documented):
    """`executor_registered` is 0 from the first moment on; the other series is there once the start is over."""
    config = {"device": "simulated", "scheduler": "127.0.0.1:1", "served_model_name": "m"}
    metrics = ExecutorMetrics(ExecutorConfig.model_validate(config))
    rules = monitored.find("PrometheusRule")["spec"]["groups"][0]["rules"]
    (rule,) = [rule for rule in rules if rule["alert"] == "HoldbackExecutorNotRegistered"]
    condition, needed = rule["expr"].split(" == 0 and on (namespace, pod) ")
    name = needed.partition("{")[0]
    assert "holdback:executor_registered{" in condition
    assert name not in {sample.metric.name for sample in metrics()}
    metrics.start.whole_s = 4000.0
    assert {name, "holdback:executor_registered"} <= {sample.metric.name for sample in metrics()}


def test_a_pool_that_is_to_have_no_executor_is_not_alerted_for(everything):
    (rule,) = [
        rule
        for rule in everything.find("PrometheusRule")["spec"]["groups"][0]["rules"]
        if rule["alert"] == "HoldbackNoExecutor"
    ]
    assert rule["expr"] == (
        'max by (namespace, model_name) (holdback:num_executors{namespace="serving",model_name!="sim"}) == 0'
    )


def test_all_models_of_the_dashboard_are_also_errors_without_one():
    (model,) = [
        one for one in json.loads(DASHBOARD.read_text(encoding="utf-8"))["templating"]["list"] if one["name"] == "model"
    ]
    assert re.fullmatch(model["allValue"], "")


def test_the_dashboard_is_one_json_document_in_a_config_map(monitored):
    config_map = monitored.find("ConfigMap", "dashboard")
    assert json.loads(config_map["data"]["holdback.json"]) == json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_a_pod_monitor_reads_the_port_that_the_processes_serve(monitored):
    for monitor in monitored.all("PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        for one in monitored.all("Deployment"):
            if wanted <= one["spec"]["template"]["metadata"]["labels"].items():
                (container,) = one["spec"]["template"]["spec"]["containers"]
                ports = {port["name"]: port["containerPort"] for port in container["ports"]}
                process = container["args"][0]
                assert ports[endpoint["port"]] == monitored.config(process)["metrics_port"]
    assert len(monitored.all("PodMonitor")) == 3


def test_without_metrics_no_port_is_open_and_nothing_asks_for_one():
    rendered = render(SMALL, sets=["metrics.enabled=false"])
    assert "metrics_port" not in rendered.config("scheduler")
    assert rendered.all("PodMonitor") == rendered.all("PrometheusRule") == rendered.all("ConfigMap", "dashboard") == []
    assert "9090" not in yaml.safe_dump_all(rendered.manifests)


def test_what_reads_metrics_is_refused_where_there_are_none():
    words = refusal(SMALL, sets=[*ON, "metrics.enabled=false"])
    for name in ("podMonitor", "dashboard", "alerts"):
        assert f"metrics.{name}.enabled is true, but metrics.enabled is false; allowed: both or neither" in words


def test_the_adapter_s_rule_in_the_docs_gives_the_namespace_and_the_names_of_the_chart():
    """Without the override an adapter does not know which label is the namespace that an autoscaler asks for."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if one.startswith("externalRules")]
    (rule,) = yaml.safe_load(block)["externalRules"]
    assert rule["resources"] == {"overrides": {"namespace": {"resource": "namespace"}}}
    pattern, name = rule["name"]["matches"], rule["name"]["as"].replace("$1", r"\1")
    hpa = render(SMALL, sets=["pools[0].executors[0].autoscaling.type=hpa"]).find("HorizontalPodAutoscaler")
    asked = [one["external"]["metric"]["name"] for one in hpa["spec"]["metrics"]]
    series = ["holdback:queued_prefill_tokens", "holdback:kv_cache_usage_executors"]
    assert [re.sub(pattern, name, one) for one in series] == asked


def test_an_autoscaler_without_metrics_is_refused():
    words = refusal(SMALL, sets=["metrics.enabled=false", "pools[0].executors[0].autoscaling.type=hpa"])
    assert "pools[small].executors[cpu].autoscaling.type is hpa, but metrics.enabled is false" in words
