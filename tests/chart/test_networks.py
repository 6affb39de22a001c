"""Who reaches whom, by the network policies; a namespace may refuse everything that they do not allow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.rendering import SMALL, Rendered, render

PRECOMPILE = ["executorDefaults.precompile.enabled=true", "executorDefaults.compileCache.existingClaim=compiled"]


def labels_of(rendered: Rendered) -> dict[str, dict[str, str]]:
    """Labels of the pods of each Deployment and Job."""
    return {one["metadata"]["name"]: one["spec"]["template"]["metadata"]["labels"] for one, _ in rendered.pods()}


def policies_of(rendered: Rendered, labels: dict[str, str]) -> list[dict[str, Any]]:
    """Those that select such a pod."""
    specs = [one["spec"] for one in rendered.all("NetworkPolicy")]
    return [spec for spec in specs if spec["podSelector"]["matchLabels"].items() <= labels.items()]


def named(rendered: Rendered, name: str) -> dict[str, Any]:
    spec = rendered.find("NetworkPolicy", name)["spec"]
    assert isinstance(spec, dict)
    return spec


def components(peers: list[dict[str, Any]]) -> list[str]:
    return [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in peers]


@pytest.mark.parametrize("which", ["small", "everything"])
def test_every_pod_has_one_policy_for_both_directions(which, request):
    """Jobs too: without one they are open, or in a namespace that denies by default, cut off."""
    rendered = request.getfixturevalue(which)
    labels = labels_of(rendered)
    assert any(name.endswith("-test") for name in labels)
    for name, pod_labels in labels.items():
        assert [spec["policyTypes"] for spec in policies_of(rendered, pod_labels)] == [["Ingress", "Egress"]], name
    assert render(SMALL, sets=["networkPolicy.enabled=false"]).all("NetworkPolicy") == []


def test_only_gateways_and_executors_reach_a_scheduler_and_only_it_its_executors(everything):
    assert components(named(everything, "large-scheduler")["ingress"][0]["from"]) == ["gateway", "executor"]
    assert components(named(everything, "large-executor")["ingress"][0]["from"]) == ["scheduler"]


def test_every_pod_finds_names_on_openshift_too_and_reaches_what_the_values_add(everything):
    wanted = [{"port": port, "protocol": protocol} for port in (53, 5353) for protocol in ("UDP", "TCP")]
    policies = everything.all("NetworkPolicy")
    assert len(policies) == 9
    for policy in policies:
        assert {"ports": wanted} in policy["spec"]["egress"], policy["metadata"]["name"]
        assert {"ports": [{"port": 4317}]} in policy["spec"]["egress"], policy["metadata"]["name"]


def test_the_test_of_a_release_reaches_the_gateways_and_is_reached_by_nobody(everything, small):
    for rendered in (everything, small):
        spec = named(rendered, "holdback-test")
        assert spec["ingress"] == []
        (call,) = [rule for rule in spec["egress"] if "to" in rule]
        assert call["ports"] == [{"port": rendered.config("gateway")["port"]}]
        assert components(call["to"]) == ["gateway"]
    callers = named(everything, "holdback-gateway")["ingress"][0]["from"]
    assert components([peer for peer in callers if "podSelector" in peer]) == ["test"]
    assert "from" not in named(small, "holdback-gateway")["ingress"][0]


def test_a_job_that_compiles_calls_no_process_and_is_called_by_none(everything):
    spec = named(everything, "holdback-compile")
    assert spec["ingress"] == []
    assert [rule for rule in spec["egress"] if "to" in rule] == []
    assert render(SMALL).all("NetworkPolicy", "compile") == []
    assert len(render(SMALL, sets=PRECOMPILE).all("NetworkPolicy", "compile")) == 1
