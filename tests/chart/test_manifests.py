"""What the chart makes of its values: names, Services, security, certificates, volumes, devices, notes."""

from __future__ import annotations

import pytest
import yaml

from gateway.config import GatewayConfig
from tests.chart.rendering import CHART, EVERYTHING, EXAMPLES, SMALL, Manifest, Rendered, render, run_helm
from tools.check_chart import KUBERNETES_VERSIONS, check_manifest


def names(volumes: list[Manifest]) -> set[str]:
    return {volume["name"] for volume in volumes}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_valid_for_the_oldest_and_the_newest_kubernetes(example):
    """For those between, `make check-chart` asks."""
    versions = (KUBERNETES_VERSIONS[0], KUBERNETES_VERSIONS[-1])
    manifests = render(files=[example]).manifests
    assert [problem for manifest in manifests for problem in check_manifest(manifest, versions)] == []


def test_all_values_together_are_valid_for_every_kubernetes(everything):
    assert {"GRPCRoute", "HTTPRoute", "Ingress", "PodMonitor", "PrometheusRule", "ScaledObject"} <= {
        manifest["kind"] for manifest in everything.manifests
    }
    assert [problem for manifest in everything.manifests for problem in check_manifest(manifest)] == []


def test_the_check_finds_a_key_that_kubernetes_does_not_know(small, everything):
    deployment = yaml.safe_load(yaml.safe_dump(small.find("Deployment", "gateway")))
    deployment["spec"]["template"]["spec"]["strategy"] = {"type": "Recreate"}
    assert "strategy" in check_manifest(deployment)[0]
    scaled = yaml.safe_load(yaml.safe_dump(everything.find("ScaledObject")))
    scaled["spec"]["maxReplicas"] = 3
    assert "maxReplicas" in check_manifest(scaled)[0]


def test_what_needs_a_crd_is_off_by_default(small):
    groups = {manifest["apiVersion"].rpartition("/")[0] for manifest in small.manifests}
    assert groups == {"", "apps", "batch", "networking.k8s.io", "policy"}


def test_names_are_unique_and_all_in_the_namespace_of_the_release(everything):
    keys = [(one["kind"], one["metadata"]["name"]) for one in everything.manifests]
    assert len(keys) == len(set(keys))
    assert {one["metadata"]["namespace"] for one in everything.manifests} == {"serving"}


def test_selectors_find_their_pods_and_no_others(everything):
    pods = [(one, one["spec"]["template"]["metadata"]["labels"]) for one, _ in everything.pods()]
    for deployment in everything.all("Deployment"):
        wanted = deployment["spec"]["selector"]["matchLabels"].items()
        found = [one["metadata"]["name"] for one, labels in pods if wanted <= labels.items()]
        assert found == [deployment["metadata"]["name"]]
    for service in everything.all("Service"):
        wanted = service["spec"]["selector"].items()
        assert len([one for one, labels in pods if wanted <= labels.items()]) == 1


def test_no_value_changes_what_a_deployment_selects(small):
    """Kubernetes refuses to change it, so such an upgrade would fail."""

    def selectors(rendered: Rendered) -> dict[str, Manifest]:
        return {one["metadata"]["name"]: one["spec"]["selector"] for one in rendered.all("Deployment")}

    changed = render(
        SMALL,
        sets=[
            *("commonLabels.team=a", "gateway.podLabels.tier=b", "executorDefaults.podLabels.tier=c"),
            *("gateway.image.tag=next", "executorDefaults.device=simulated", "gateway.autoscaling.type=hpa"),
            *("fullnameOverride=hb-holdback", "nameOverride=other", "pools[0].servedModelNames={another}"),
        ],
    )
    assert selectors(changed) == selectors(small)


def test_a_cluster_may_choose_the_user_of_the_pods():
    """As OpenShift does, of numbers as large as these."""
    chosen = [
        "podSecurityContext.runAsUser=null",
        "podSecurityContext.runAsGroup=null",
        "podSecurityContext.fsGroup=null",
    ]
    for _, pod in render(SMALL, sets=chosen).pods():
        assert pod["securityContext"].keys() == {"runAsNonRoot", "fsGroupChangePolicy", "seccompProfile"}
    own = render(SMALL + "podSecurityContext: {runAsUser: 1000740000}\n")
    assert all(pod["securityContext"]["runAsUser"] == 1000740000 for _, pod in own.pods())


def test_a_scheduler_is_found_while_it_is_not_ready(small):
    service = small.find("Service", "scheduler")
    assert service["spec"]["publishNotReadyAddresses"] is True
    host, _, port = small.config("executor")["scheduler"].partition(":")
    assert host == f"{service['metadata']['name']}.serving.svc"
    assert int(port) == service["spec"]["ports"][0]["port"] == small.config("scheduler")["port"]
    assert small.config("gateway")["pools"][0]["scheduler"] == f"{host}:{port}"


@pytest.mark.case("B66")
def test_grpc_clients_see_every_gateway_and_a_pool_has_one_scheduler(small):
    assert small.find("Service", "gateway-grpc")["spec"]["clusterIP"] == "None"
    assert small.find("Service", "gateway")["spec"]["type"] == "ClusterIP"
    assert small.find("Deployment", "scheduler")["spec"]["replicas"] == 1
    config = GatewayConfig.model_fields["max_connection_age_s"]
    assert small.config("gateway").get("max_connection_age_s", config.default) == 300


def test_an_executor_advertises_the_address_of_its_pod_in_an_allowed_network(small):
    variables = {one["name"]: one for one in small.container("Deployment", "cpu")["env"]}
    field = variables["HOLDBACK_EXECUTOR__ADVERTISE_ADDRESS"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "status.podIP"
    assert "10.0.0.0/8" in small.config("scheduler")["executor_allowed_cidrs"]


def test_no_pod_has_rights_a_token_or_variables_of_services(everything):
    for manifest, pod in everything.pods():
        assert pod["automountServiceAccountToken"] is False, manifest["metadata"]["name"]
        assert pod["enableServiceLinks"] is False
        account = everything.find("ServiceAccount", pod["serviceAccountName"])
        assert account["automountServiceAccountToken"] is False
    assert everything.all("Role") == everything.all("RoleBinding") == everything.all("ClusterRole") == []


def test_containers_are_locked_down(everything, small):
    for _, pod in (*everything.pods(), *small.pods()):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


@pytest.mark.parametrize("which", ["small", "everything"])
def test_every_mount_has_its_volume_and_every_volume_is_mounted(which, request):
    for manifest, pod in request.getfixturevalue(which).pods():
        containers = [*pod.get("initContainers", ()), *pod["containers"]]
        mounted = set().union(*(names(container["volumeMounts"]) for container in containers))
        assert mounted == names(pod["volumes"]), manifest["metadata"]["name"]


def test_cores_are_left_to_the_device_plugin_and_of_whole_devices_the_first_are_named(everything):
    assert "neuron_cores" not in everything.config("executor", "cores")
    assert everything.config("executor", "devices")["neuron_cores"] == "0"
    assert everything.config("executor", "devices")["tensor_parallel_size"] == 1
    resource = "neuron.resource=aws.amazon.com/neuron"
    cut = render(
        SMALL, sets=[f"executorDefaults.{one}" for one in ("device=neuron", resource, "tensorParallelSize=4")]
    ).config("executor")
    assert (cut["neuron_cores"], cut["tensor_parallel_size"]) == ("0-3", 4)
    limits = everything.container("Deployment", "cores")["resources"]["limits"]
    assert limits["aws.amazon.com/neuroncore"] == 2
    assert everything.container("Deployment", "devices")["resources"]["limits"]["aws.amazon.com/neuron"] == 1
    for _, pod in everything.pods():
        assert not any(one["name"].startswith("NEURON_RT") for one in pod["containers"][0]["env"])


def test_a_job_compiles_for_a_group_into_its_cache(everything):
    (job,) = [one for one in everything.all("Job") if "compile" in one["metadata"]["name"]]
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][-2:] == ["--compile-only", "--no-require-cached"]
    (cache,) = [one for one in pod["volumes"] if one["name"] == "cache"]
    claim = everything.find("PersistentVolumeClaim", "cores-cache")
    assert cache["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert pod["containers"][0]["resources"] == everything.container("Deployment", "cores")["resources"]
    assert cache in everything.pod("Deployment", "cores")["volumes"]


def test_tls_is_mutual_between_the_processes(everything):
    for process, name in (("gateway", ""), ("scheduler", "large-scheduler"), ("executor", "cores")):
        config = everything.config(process, name)
        assert config["tls_cert"] == "/etc/holdback/tls/tls.crt"
        assert config["tls_ca"] == config["tls_client_ca"] == "/etc/holdback/tls/ca.crt"
        assert "insecure_bind" not in config
    secrets = {
        one["secret"]["secretName"] for _, pod in everything.pods() for one in pod["volumes"] if one["name"] == "tls"
    }
    assert secrets == {"gateway-tls", "scheduler-tls", "executor-tls"}


def test_certificates_have_the_names_that_are_dialled():
    values = SMALL.replace(
        "tls: {enabled: false}", "tls: {enabled: true, certManager: {enabled: true, issuerRef: {name: ca}}}"
    )
    rendered = render(values)
    certificates = {one["spec"]["secretName"]: one["spec"]["dnsNames"] for one in rendered.all("Certificate")}
    host = rendered.config("gateway")["pools"][0]["scheduler"].partition(":")[0]
    assert host in certificates["hb-holdback-small-scheduler-tls"]
    assert certificates["hb-holdback-small-executor-tls"] == [rendered.config("scheduler")["tls_server_name"]]
    for name in ("hb-holdback-gateway-grpc.serving.svc", "hb-holdback-gateway.serving.svc.cluster.local"):
        assert name in certificates["hb-holdback-gateway-tls"]
    assert f"{host}.cluster.local" in certificates["hb-holdback-small-scheduler-tls"]
    other = render(values, sets=["network.clusterDomain=example.org"]).find("Certificate", "gateway-tls")
    assert "hb-holdback-gateway-grpc.serving.svc.example.org" in other["spec"]["dnsNames"]
    assert [check_manifest(one) for one in rendered.all("Certificate")] == [[], [], []]
    assert "tls_client_ca" not in rendered.config("gateway")
    assert rendered.config("scheduler")["tls_client_ca"] == "/etc/holdback/tls/ca.crt"


def test_without_tls_processes_are_told_to_listen_in_the_clear(small):
    assert all(small.config(process)["insecure_bind"] is True for process in ("gateway", "scheduler", "executor"))
    assert all("tls" not in names(pod["volumes"]) for _, pod in small.pods())


def test_keys_and_extras_reach_the_gateway(everything):
    pod = everything.pod("Deployment", "gateway")
    container = everything.container("Deployment", "gateway")
    assert everything.config("gateway")["api_keys"] == "/etc/holdback/keys/keys.yaml"
    assert {"keys", "more"} <= names(pod["volumes"])
    assert {"name": "GRPC_TRACE", "value": "http"} in container["env"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert container["image"] == "registry:5000/holdback/gateway@sha256:" + "ab" * 32
    metadata = everything.find("Deployment", "gateway")["spec"]["template"]["metadata"]
    assert metadata["labels"]["tier"] == "front"
    assert metadata["annotations"]["note"] == "here"
    assert all(one["metadata"]["labels"]["team"] == "serving" for one in everything.manifests)
    assert all(one["metadata"]["annotations"]["owner"] == "platform" for one in everything.manifests)


def test_the_port_of_the_headless_service_is_the_one_that_gateways_listen_on(small):
    (port,) = small.find("Service", "gateway-grpc")["spec"]["ports"]
    assert port["port"] == small.config("gateway")["port"]


def test_a_label_of_all_and_of_one_object_is_the_object_s_once():
    rendered = render(
        SMALL, sets=["metrics.dashboard.enabled=true", "commonLabels.team=a", "metrics.dashboard.labels.team=b"]
    )
    assert rendered.find("ConfigMap", "dashboard")["metadata"]["labels"]["team"] == "b"
    assert rendered.find("Deployment", "gateway")["metadata"]["labels"]["team"] == "a"


def test_an_ingress_leads_the_api_alone_to_the_http_service(everything):
    """Not the metrics."""
    spec = everything.find("Ingress")["spec"]
    paths = [path for rule in spec["rules"] for path in rule["http"]["paths"]]
    assert {(path["path"], path["pathType"]) for path in paths} == {("/v1", "Prefix")}
    assert [rule["host"] for rule in spec["rules"]] == ["llm.example.com", "plain.example.com"]
    assert spec["tls"] == [{"hosts": ["llm.example.com"], "secretName": "llm-tls"}]
    assert spec["rules"][0]["http"]["paths"][0]["backend"]["service"]["name"] == "hb-holdback-gateway"


def notes(values: str) -> str:
    done = run_helm("install", "hb", str(CHART), "-n", "serving", "--dry-run=client", values=values)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


def test_the_notes_say_how_to_call_it_and_what_is_open(small):
    text = notes(SMALL)
    assert "dns:///hb-holdback-gateway-grpc.serving.svc:50051" in text
    assert "http://hb-holdback-gateway.serving.svc:8000/v1" in text
    assert "TLS is off" in text
    assert "There are no API keys" in text
    assert "helm -n serving test hb\n" in text
    assert "up to 240 s" in text
    assert "small-model has one executor: while it starts again, requests wait for up to 3600 s." in text


def test_the_notes_list_the_names_that_given_certificates_must_have(everything):
    text = notes(EVERYTHING)
    for name in ("hb-holdback-gateway-grpc.serving.svc", "hb-holdback-large-scheduler.serving.svc"):
        assert name in text
    assert everything.config("scheduler", "large-scheduler")["tls_server_name"] in text
    assert "TLS is off" not in text
    assert "There are no API keys" not in text
    assert "helmTest.apiKeySecret" not in text


def test_the_notes_say_how_to_call_a_gateway_with_tls_from_elsewhere():
    """No certificate has the name localhost."""
    text = notes(EVERYTHING)
    assert "kubectl -n serving get secret gateway-tls -o jsonpath='{.data.ca\\.crt}' | base64 -d > ca.crt" in text
    assert (
        "curl --cacert ca.crt --cert tls.crt --key tls.key -H 'Authorization: Bearer KEY' "
        "--resolve hb-holdback-gateway.serving.svc:8000:127.0.0.1 https://hb-holdback-gateway.serving.svc:8000/v1/models"
    ) in text
    assert "--resolve" not in notes(SMALL)


def test_the_notes_tell_of_a_pool_without_executors():
    assert "sim has no executors, for all its groups have replicas 0" in notes(EVERYTHING)


def test_the_notes_say_what_the_test_needs():
    text = notes(SMALL + "gateway: {apiKeys: {existingSecret: keys}}\nhelmTest: {timeoutSeconds: 4000}\n")
    assert "helm -n serving test hb --timeout 4060s\n" in text
    assert "It needs an API key in the secret helmTest.apiKeySecret, which is not set." in text
