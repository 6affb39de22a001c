"""Values that no cluster could run are refused in words, and the nearest ones that it could are taken."""

from __future__ import annotations

import pytest

from tests.chart.rendering import SMALL, Manifest, refusal, render

IMPOSSIBLE = """
podSecurityContext: {runAsUser: 0}
network: {podCIDRs: [10.0.0.1/8, 10.0.0.0/8, 0.0.0.0/0, 10.1.2.3/32]}
gateway:
  autoscaling: {type: hpa}
  resources: {requests: {cpu: null}}
  extraEnv: [{name: NEURON_RT_NUM_CORES, value: "1"}]
  extraVolumes: [{name: both, emptyDir: {}, hostPath: {path: /a}}, {name: one, emptyDir: {}}]
  extraVolumeMounts:
    - {name: tls, mountPath: /a}
    - {name: keys, mountPath: /b}
    - {name: model-large, mountPath: /c}
    - {name: tokenizer-small, mountPath: /d}
    - {name: one, mountPath: /e, subPath: a/../b}
executorDefaults:
  extraEnv: [{name: NEURON_RT_VISIBLE_CORES, value: "0"}]
  extraVolumeMounts: [{name: model, mountPath: /a}]
"""
SECOND = """
  - name: large
    servedModelNames: [large]
    model: {persistentVolumeClaim: {claimName: models, path: ../large}}
    tokenizer: {persistentVolumeClaim: {claimName: tokenizers, path: a/..}}
    executors: [{name: cpu, resources: {requests: {nvidia.com/gpu: 1}}}]
  - name: image
    servedModelNames: [image]
    model: {imagePath: /m}
    executors: [{name: cpu, maxSurge: "0%", maxUnavailable: "00%"}]
"""
SENTENCES = (
    "podSecurityContext and containerSecurityContext have runAsUser 0 and runAsNonRoot; allowed: one of them",
    "network.podCIDRs has 10.0.0.1/8; allowed: networks without bits of a host",
    "gateway.autoscaling.type is hpa, but gateway.resources.requests.cpu is not set, of which it takes a share",
    "gateway.extraEnv has NEURON_RT_NUM_CORES, which the device plugin or the chart names",
    "gateway.extraVolumes has both with emptyDir and hostPath; allowed: one kind",
    "gateway.extraVolumeMounts has tls, which is no volume",
    "gateway.extraVolumeMounts has keys, which is no volume",
    "gateway.extraVolumeMounts has model-large, which is no volume",
    "gateway.extraVolumeMounts.subPath is a/../b; allowed: a folder of the volume, without ..",
    "pools[small].executors[cpu].extraEnv has NEURON_RT_VISIBLE_CORES, which the device plugin or the chart names",
    "pools[image].executors[cpu].extraVolumeMounts has model, which is no volume",
    "pools[large].model.persistentVolumeClaim.path is ../large; allowed: a folder of the volume, without ..",
    "pools[large].tokenizer.persistentVolumeClaim.path is a/..; allowed: a folder of the volume, without ..",
    "pools[large].executors[cpu].resources.requests.nvidia.com/gpu is 1, but it has no limit",
    "pools[image].executors[cpu].maxSurge and maxUnavailable are both 0; allowed: one of them",
)


@pytest.fixture(scope="module")
def words() -> str:
    return refusal(SMALL + SECOND + IMPOSSIBLE)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_what_cannot_run_is_refused_in_words(sentence, words):
    assert sentence in words


def test_what_can_run_is_not(words):
    for possible in (
        *("10.0.0.0/8", "0.0.0.0/0", "10.1.2.3/32", "tokenizer-small", "has one with"),
        *("pools[small].executors[cpu].extraVolumeMounts has model", "pools[small].model"),
    ):
        assert possible not in words


def test_a_cpu_limit_is_a_request_too_for_an_autoscaler():
    rendered = render(
        SMALL + "gateway: {autoscaling: {type: hpa}, resources: {requests: {cpu: null}, limits: {cpu: 1}}}"
    )
    assert rendered.container("Deployment", "gateway")["resources"]["limits"]["cpu"] == 1


def certificates(duration: str, renew_before: str) -> str:
    manager = f"{{enabled: true, issuerRef: {{name: ca}}, duration: {duration}, renewBefore: {renew_before}}}"
    return SMALL.replace("{enabled: false}", f"{{enabled: true, certManager: {manager}}}")


@pytest.mark.parametrize(
    ("duration", "renew_before", "sentence"),
    [
        (
            "10h",
            "600m",
            "tls.certManager.renewBefore is 600m; allowed: at least 5m, and less than duration, which is 10h",
        ),
        ("10h", "299s", "tls.certManager.renewBefore is 299s; allowed: at least 5m"),
        ("0.5h", "10m", "tls.certManager.duration is 0.5h; allowed: at least 1h"),
    ],
)
def test_certificates_that_could_not_be_renewed_are_refused(duration, renew_before, sentence):
    assert sentence in refusal(certificates(duration, renew_before))


def test_certificates_may_be_short():
    (certificate, *_) = render(certificates("1h", "0.5h")).all("Certificate")
    assert (certificate["spec"]["duration"], certificate["spec"]["renewBefore"]) == ("1h", "0.5h")


# One wrong value each, and its place.
SCHEMA = {
    "network.podCIDRs={10.0.0.0/33}": "/network/podCIDRs/0",
    "network.listenAddress=256.1.1.1": "/network/listenAddress",
    "executorDefaults.maxUnavailable=101%": "/executorDefaults/maxUnavailable",
    "gateway.tolerations[0].operator=Is": "/gateway/tolerations/0/operator",
    "gateway.tolerations[0].effect=Never": "/gateway/tolerations/0/effect",
    "networkPolicy.gatewayFrom[0].ipBlock.cidr=10.0.0.0": "/networkPolicy/gatewayFrom/0/ipBlock/cidr",
    "gateway.topologySpreadConstraints[0].maxSkew=1,"
    "gateway.topologySpreadConstraints[0].topologyKey=a,"
    "gateway.topologySpreadConstraints[0].whenUnsatisfiable=Perhaps": (
        "/gateway/topologySpreadConstraints/0/whenUnsatisfiable"
    ),
}


@pytest.fixture(scope="module")
def schema_words() -> str:
    return refusal(SMALL, sets=tuple(SCHEMA))


@pytest.mark.parametrize("assignment", SCHEMA)
def test_the_schema_knows_what_kubernetes_checks_beyond_types(assignment, schema_words):
    assert f"at '{SCHEMA[assignment]}':" in schema_words


def test_it_takes_what_kubernetes_takes():
    spread = "{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}"
    rendered = render(
        SMALL
        + f"""
network: {{listenAddress: "::", podCIDRs: [10.255.0.0/16, "fd00::/8", "2001:db8::/128"]}}
networkPolicy: {{gatewayFrom: [{{ipBlock: {{cidr: 10.0.0.0/8}}}}]}}
gateway:
  tolerations: [{{operator: Exists}}, {{key: a, value: b, effect: NoExecute}}]
  topologySpreadConstraints: [{spread}]
executorDefaults: {{maxUnavailable: 100%, maxSurge: 200%}}
"""
    )
    assert rendered.config("gateway")["host"] == "::"
    strategy = rendered.find("Deployment", "cpu")["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": "200%", "maxUnavailable": "100%"}


def resources(rendered_of: str, sets: tuple[str, ...] = ()) -> Manifest:
    found = render(rendered_of, sets=sets).container("Deployment", "cpu")["resources"]
    assert isinstance(found, dict)
    return found


def test_a_null_takes_a_default_request_or_limit_away_from_one_group():
    one = SMALL.replace("{name: cpu}", "{name: cpu, resources: {requests: {memory: null}, limits: {memory: null}}}")
    assert resources(one) == {"requests": {"cpu": "2"}, "limits": {}}
    assert resources(SMALL, ("pools[0].executors[0].resources.limits.memory=null",))["limits"] == {}
    assert resources(SMALL)["limits"] == {"memory": "8Gi"}
    pool = SMALL.replace("executors:", "scheduler: {resources: {limits: {memory: null}}}\n    executors:")
    assert render(pool).container("Deployment", "scheduler")["resources"]["limits"] == {}
