"""Names that read as another type of YAML stay texts, wherever they stand."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import pytest
import yaml

from tests.chart.rendering import CHART, refusal, run_helm

# The first letter of a pool's or a group's name is one; the others may be digits alone.
WORDS = ("on", "yes", "true", "null", "y", "off")
NUMBERS = ("123", "2024", "1e3", "0x1f", "1.5", "010")

BOOLEANS = (
    "automountServiceAccountToken",
    "publishNotReadyAddresses",
    "readOnlyRootFilesystem",
    "runAsNonRoot",
    "readOnly",
)
"""What the chart itself sets to true."""

VALUES = """
fullnameOverride: "true"
commonLabels: {team: "123"}
commonAnnotations: {owner: "null"}
imagePullSecrets: [{name: "1e3"}]
tls:
  enabled: true
  existingSecrets: {gateway: "123", scheduler: "on", executor: "1e3"}
network: {clusterDomain: "2024"}
gateway:
  image: {repository: "12", tag: "34"}
  apiKeys: {existingSecret: "2024", key: "null"}
  ingress: {enabled: true, className: "on", annotations: {a: "yes"}, hosts: [{host: "1.5", tlsSecret: "0x1f"}]}
  gatewayApi:
    http: {parentRefs: [{name: "123", namespace: "1e3", sectionName: "on"}], hostnames: ["010"]}
    grpc: {parentRefs: [{name: "on"}], hostnames: ["true"]}
  service: {grpc: {annotations: {a: "1.5"}}}
  priorityClassName: "on"
  nodeSelector: {a: "true"}
  podLabels: {tier: "1e3"}
  podAnnotations: {note: "2024"}
  extraEnv: [{name: "y", value: "null"}]
  extraVolumes: [{name: "123", emptyDir: {}}]
  extraVolumeMounts: [{name: "123", mountPath: /a, subPath: "1e3"}]
poolDefaults:
  tokenizer: {files: ["on", "1e3"]}
  scheduler: {priorityClassName: "yes"}
executorDefaults:
  compileCache: {storageClassName: "2024", size: "123"}
  precompile: {enabled: true}
  autoscaling: {keda: {serverAddress: "http://p", authenticationRef: "on"}}
pools:
  - name: "on"
    servedModelNames: ["null", "1e3"]
    model: {persistentVolumeClaim: {claimName: "123", path: "2024"}}
    executors:
      - {name: "yes", autoscaling: {type: keda}}
      - {name: "y", compileCache: {existingClaim: "0x1f"}, priorityClassName: "true"}
  - name: "true"
    servedModelNames: ["123"]
    model: {imagePath: /m}
    tokenizer: {configMap: "1e3"}
    executors:
      - name: "off"
        autoscaling: {type: hpa, hpa: {queuedPrefillTokensMetric: "1e3", kvCacheUsageMetric: "on"}}
  - name: "y"
    servedModelNames: ["y"]
    model: {persistentVolumeClaim: {claimName: "1.5"}}
    tokenizer: {persistentVolumeClaim: {claimName: "010", path: "on"}}
    executors: [{name: "null", device: neuron}]
metrics:
  podMonitor: {enabled: true, labels: {release: "2024"}}
  dashboard: {enabled: true, labels: {a: "on"}}
  alerts: {enabled: true, labels: {a: "0x1f"}}
helmTest: {apiKeySecret: {name: "1e3", key: "123"}}
"""


def scalars(node: yaml.Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], yaml.ScalarNode]]:
    """Each value of a document that is no mapping and no list, with its place."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from scalars(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from scalars(value, path)
    elif isinstance(node, yaml.ScalarNode):
        yield path, node


@pytest.fixture(scope="module")
def rendered() -> str:
    done = run_helm("template", "2024", str(CHART), "-n", "123", values=VALUES)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_name_that_reads_as_another_type_is_quoted_everywhere(rendered):
    """What it reads as differs between parsers of YAML, so that it must have quotes."""
    places = collections.defaultdict(set)
    for document in yaml.compose_all(rendered, yaml.SafeLoader):
        for path, scalar in scalars(document) if document is not None else ():
            if scalar.value in (*WORDS, *NUMBERS) and path[-1] not in BOOLEANS:
                assert scalar.style in ("'", '"'), f"{'.'.join(path)}: {scalar.value}"
                places[scalar.value].add(path[-1])
    assert places["123"] >= {"namespace", "claimName", "secretName", "name", "team", "key", "storage"}
    assert places["1e3"] >= {"name", "subPath", "tier", "namespace", "command"}
    assert places["on"] >= {"holdback/pool", "ingressClassName", "priorityClassName", "sectionName", "name"}
    assert places["2024"] >= {"app.kubernetes.io/instance", "storageClassName", "subPath", "secretName", "note"}
    assert places["0x1f"] >= {"claimName", "secretName", "a"}
    assert places["null"] >= {"holdback/group", "owner", "value"}


def test_a_configuration_has_the_names_as_texts(rendered):
    configs = {
        one["metadata"]["name"]: yaml.safe_load(text)
        for one in yaml.safe_load_all(rendered)
        if one and one["kind"] == "ConfigMap"
        for file, text in one["data"].items()
        if file.endswith(".yaml")
    }
    pools = configs["true-gateway"]["pools"]
    assert [pool["served_model_names"] for pool in pools] == [["null", "1e3"], ["123"], ["y"]]
    assert configs["true-on-scheduler"]["served_model_name"] == "null"
    assert configs["true-true-off"]["served_model_name"] == "123"


# One wrong text each, and its place. All are given to one run of Helm.
WRONG = {
    "gateway.priorityClassName=a: b": "/gateway/priorityClassName",
    "gateway.ingress.className=a b": "/gateway/ingress/className",
    "executorDefaults.autoscaling.hpa.kvCacheUsageMetric=a/b": "/executorDefaults/autoscaling/hpa/kvCacheUsageMetric",
    "gateway.gatewayApi.http.parentRefs[0].name=a: b": "/gateway/gatewayApi/http/parentRefs/0/name",
    "gateway.gatewayApi.http.parentRefs[0].namespace=A": "/gateway/gatewayApi/http/parentRefs/0/namespace",
    "tls.certManager.issuerRef.kind=a b": "/tls/certManager/issuerRef/kind",
    "tls.certManager.gatewayDnsNames={a b}": "/tls/certManager/gatewayDnsNames/0",
    "gateway.nodeSelector.a=x y": "/gateway/nodeSelector/a",
    "gateway.extraVolumeMounts[0].name=a_b": "/gateway/extraVolumeMounts/0/name",
    "helmTest.apiKeySecret.key=a b": "/helmTest/apiKeySecret/key",
}


@pytest.fixture(scope="module")
def wrong_words() -> str:
    return refusal("tls: {enabled: false}", sets=tuple(WRONG))


@pytest.mark.parametrize("assignment", WRONG)
def test_a_text_that_kubernetes_does_not_take_there_is_refused(assignment, wrong_words):
    assert f"at '{WRONG[assignment]}':" in wrong_words
