"""How pods start, are probed, scaled, rolled out and ended."""

from __future__ import annotations

import math

import pytest

from holdback.health import LIVENESS, READINESS, STARTUP
from tests.chart.rendering import SMALL, Rendered, render


def test_a_scheduler_is_one_replica_that_ends_before_the_next_starts(small):
    spec = small.find("Deployment", "scheduler")["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize(("name", "startup"), [("gateway", LIVENESS), ("scheduler", LIVENESS), ("cpu", STARTUP)])
def test_probes_ask_the_health_port_by_grpc(small, name, startup):
    container = small.container("Deployment", name)
    (process,) = container["args"][:1]
    port = small.config(process)["health_port"]
    assert container["startupProbe"]["grpc"] == {"port": port, "service": startup}
    assert container["livenessProbe"]["grpc"] == {"port": port, "service": LIVENESS}
    assert container["readinessProbe"]["grpc"] == {"port": port, "service": READINESS}


@pytest.mark.parametrize("seconds", [10, 601, 3600])
def test_an_executor_has_its_whole_start_up_time(seconds):
    rendered = render(SMALL, sets=[f"pools[0].executors[0].startupTimeoutSeconds={seconds}"])
    probe = rendered.container("Deployment", "cpu")["startupProbe"]
    assert seconds <= probe["periodSeconds"] * probe["failureThreshold"] < seconds + probe["periodSeconds"]
    assert rendered.find("Deployment", "cpu")["spec"]["progressDeadlineSeconds"] > seconds


def test_a_rollout_waits_for_executors_that_others_are_ready_by():
    second = (
        SMALL.replace("[{name: cpu}]", "[{name: cpu, startupTimeoutSeconds: 700}]")
        + """
  - name: slow
    servedModelNames: [slow]
    model: {imagePath: /m}
    executors: [{name: cpu, startupTimeoutSeconds: 9000}]
"""
    )
    rendered = render(second)
    deadlines = {
        name: rendered.find("Deployment", name)["spec"]["progressDeadlineSeconds"]
        for name in ("gateway", "small-scheduler", "slow-scheduler")
    }
    assert deadlines == {"gateway": 9600, "small-scheduler": 1300, "slow-scheduler": 9600}


def test_a_group_without_replicas_does_not_lengthen_the_wait_for_an_executor():
    groups = "[{name: cpu, startupTimeoutSeconds: 100}, {name: spare, replicas: 0, startupTimeoutSeconds: 9000}]"
    rendered = render(SMALL.replace("[{name: cpu}]", groups))
    assert rendered.config("scheduler")["executor_loss_timeout_s"] == 100
    assert rendered.find("Deployment", "spare")["spec"]["progressDeadlineSeconds"] == 9600


def test_requests_wait_for_the_only_executor_of_a_pool_as_long_as_it_may_take_to_start(small):
    assert small.config("scheduler")["executor_loss_timeout_s"] == 3600
    two = render(SMALL, sets=["pools[0].executors[0].replicas=2"])
    assert "executor_loss_timeout_s" not in two.config("scheduler")
    own = render(SMALL, sets=["pools[0].scheduler.config.executor_loss_timeout_s=7"])
    assert own.config("scheduler")["executor_loss_timeout_s"] == 7


@pytest.mark.case("B62")
@pytest.mark.parametrize("drain", [120, 0.5, 4000])
def test_a_gateway_has_time_for_its_pre_stop_and_its_drain(drain):
    rendered = render(SMALL + f"gateway: {{preStopSeconds: 7, config: {{drain_timeout_s: {drain}}}}}")
    deployment = rendered.find("Deployment", "gateway")
    pod = rendered.pod("Deployment", "gateway")
    sleep = rendered.container("Deployment", "gateway")["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert sleep == 7
    assert pod["terminationGracePeriodSeconds"] == 7 + math.ceil(drain) + 15
    assert rendered.config("gateway")["drain_timeout_s"] == drain
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert "strategy" not in pod


def test_a_gateway_without_a_pause_has_no_hook():
    rendered = render(SMALL, sets=["gateway.preStopSeconds=0"])
    assert "lifecycle" not in rendered.container("Deployment", "gateway")
    assert rendered.pod("Deployment", "gateway")["terminationGracePeriodSeconds"] == 135


def test_an_executor_has_time_for_its_drain(small):
    assert small.config("executor")["drain_timeout_s"] == 5
    assert small.pod("Deployment", "cpu")["terminationGracePeriodSeconds"] == 30
    assert small.pod("Deployment", "scheduler")["terminationGracePeriodSeconds"] == 30


@pytest.mark.case("B64")
def test_an_autoscaler_owns_the_replicas(everything, small):
    for name in ("gateway", "devices", "split"):
        assert "replicas" not in everything.find("Deployment", name)["spec"]
    assert everything.find("Deployment", "cores")["spec"]["replicas"] == 3
    assert small.find("Deployment", "gateway")["spec"]["replicas"] == 2


@pytest.mark.case("B64")
def test_no_replicas_are_no_replicas(everything):
    assert everything.find("Deployment", "sim-sim")["spec"]["replicas"] == 0
    assert render(SMALL, sets=["gateway.replicas=0"]).find("Deployment", "gateway")["spec"]["replicas"] == 0


@pytest.mark.case("B69")
def test_autoscalers_scale_on_averages_and_wait_before_they_scale_down(everything):
    hpa = everything.find("HorizontalPodAutoscaler", "devices")["spec"]
    assert hpa["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300
    targets = {one["external"]["metric"]["name"]: one["external"]["target"] for one in hpa["metrics"]}
    assert targets == {
        "holdback_queued_prefill_tokens": {"type": "AverageValue", "averageValue": "4000"},
        "holdback_kv_cache_usage_executors": {"type": "AverageValue", "averageValue": "800m"},
    }
    scaled = everything.find("ScaledObject", "split")["spec"]
    assert scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    assert [one["metadata"]["query"] for one in scaled["triggers"]] == [
        'sum(holdback:queued_prefill_tokens{namespace="serving",model_name="tiny"})',
        'sum(holdback:kv_cache_usage_executors{namespace="serving",model_name="tiny"})',
    ]
    assert [(one["metricType"], one["metadata"]["threshold"]) for one in scaled["triggers"]] == [
        ("AverageValue", "4000"),
        ("AverageValue", "0.8"),
    ]
    # a series that is missing is an error and scales nothing
    assert {one["metadata"]["ignoreNullValues"] for one in scaled["triggers"]} == {"false"}


@pytest.mark.case("B69")
def test_a_load_that_comes_and_goes_does_not_add_and_remove_executors(everything):
    """The formula of the autoscaler, with its window, over 0 and 12 requests of 1,000 tokens every 30 s."""
    spec = everything.find("HorizontalPodAutoscaler", "devices")["spec"]
    window = spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"]
    target = int(spec["metrics"][0]["external"]["target"]["averageValue"])
    replicas, recommendations, history = spec["minReplicas"], [], []
    for step in range(40):
        tokens = 12_000 * (step % 2)
        wanted = min(max(math.ceil(tokens / target), spec["minReplicas"]), spec["maxReplicas"])
        recommendations.append(wanted)
        recent = recommendations[-(window // 30 + 1) :]
        replicas = max(recent) if max(recent) < replicas else max(replicas, wanted)
        history.append(replicas)
    assert history[0] == 2
    assert set(history[1:]) == {3}


def test_disruption_budgets_are_where_more_than_one_replica_is_guaranteed(everything, small):
    budgets = {one["metadata"]["name"]: one["spec"] for one in everything.all("PodDisruptionBudget")}
    assert set(budgets) == {"hb-holdback-gateway", "hb-holdback-large-cores", "hb-holdback-large-devices"}
    assert all(spec["maxUnavailable"] == 1 for spec in budgets.values())
    assert [one["metadata"]["name"] for one in small.all("PodDisruptionBudget")] == ["hb-holdback-gateway"]


def test_another_configuration_is_another_pod_where_it_changed():
    def stamps(rendered: Rendered) -> dict[str, str]:
        return {
            one["metadata"]["name"]: one["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
            for one in rendered.all("Deployment")
        }

    before, after = stamps(render(SMALL)), stamps(render(SMALL, sets=["pools[0].executors[0].config.max_num_seqs=9"]))
    assert {name for name in before if before[name] != after[name]} == {"hb-holdback-small-cpu"}


def test_whatever_changes_its_pods_is_another_job():
    """Kubernetes refuses to change one."""
    on = ["executorDefaults.precompile.enabled=true", "executorDefaults.compileCache.existingClaim=compiled"]
    names = set()
    changes = (
        "executorDefaults.image.tag=next",
        "executorDefaults.config.max_num_seqs=9",
        "executorDefaults.resources.limits.memory=9Gi",
        "executorDefaults.nodeSelector.zone=a",
        "executorDefaults.extraEnv[0].name=A",
        "executorDefaults.compileCache.existingClaim=other",
        "commonLabels.team=serving",
        "imagePullSecrets[0].name=registry",
        "pools[0].model.persistentVolumeClaim.claimName=others",
    )
    for more in ([], *([change] for change in changes)):
        jobs = render(SMALL, sets=[*on, *more]).all("Job")
        names |= {job["metadata"]["name"] for job in jobs if "compile" in job["metadata"]["name"]}
    assert len(names) == 1 + len(changes)


def test_what_does_not_change_its_pods_is_the_same_job():
    on = ["executorDefaults.precompile.enabled=true", "executorDefaults.compileCache.existingClaim=compiled"]
    names = set()
    for more in ([], ["executorDefaults.replicas=3"], ["gateway.replicas=3"]):
        jobs = render(SMALL, sets=[*on, *more]).all("Job")
        names |= {job["metadata"]["name"] for job in jobs if "compile" in job["metadata"]["name"]}
    assert len(names) == 1
