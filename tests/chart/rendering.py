"""Runs Helm on the chart, and finds things in what it renders."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART = ROOT / "k8s" / "chart"
EXAMPLES = sorted((ROOT / "k8s" / "examples").glob("*.yaml"))
RELEASE = "hb"
NAMESPACE = "serving"

Manifest = dict[str, Any]


def helm_program() -> str:
    """HOLDBACK_HELM, else what `make helm` made."""
    program = os.environ.get("HOLDBACK_HELM") or str(ROOT / ".cache" / "helm" / "helm")
    if not pathlib.Path(program).is_file():
        pytest.fail(f"no Helm in {program}; make it with: make helm", pytrace=False)
    return program


@dataclass(frozen=True)
class Rendered:
    """What the chart makes of some values."""

    manifests: tuple[Manifest, ...]

    def find(self, kind: str, name: str = "") -> Manifest:
        """The only manifest of a kind whose name ends with `name`."""
        found = self.all(kind, name)
        assert len(found) == 1, f"{kind} {name}: {[one['metadata']['name'] for one in found]}"
        return found[0]

    def all(self, kind: str, name: str = "") -> list[Manifest]:
        return [one for one in self.manifests if one["kind"] == kind and one["metadata"]["name"].endswith(name)]

    def config(self, process: str, name: str = "") -> dict[str, Any]:
        """What a process is configured with; `name` chooses between several."""
        maps = [one for one in self.all("ConfigMap", name) if f"{process}.yaml" in one["data"]]
        assert len(maps) == 1, [one["metadata"]["name"] for one in maps]
        config = yaml.safe_load(maps[0]["data"][f"{process}.yaml"])
        assert isinstance(config, dict)
        return config

    def pods(self) -> Iterator[tuple[Manifest, Manifest]]:
        """Each manifest that makes pods, with the pod's spec."""
        for one in self.manifests:
            template = one.get("spec", {}).get("template")
            if template is not None and one["kind"] in {"Deployment", "Job"}:
                yield one, template["spec"]

    def pod(self, kind: str, name: str = "") -> Manifest:
        spec = self.find(kind, name)["spec"]["template"]["spec"]
        assert isinstance(spec, dict)
        return spec

    def container(self, kind: str, name: str = "") -> Manifest:
        (container,) = self.pod(kind, name)["containers"]
        assert isinstance(container, dict)
        return container


def run_helm(*arguments: str, values: str = "") -> subprocess.CompletedProcess[str]:
    """`values` are read as one more file of values, after those that `arguments` name."""
    given = ("-f", "-") if values else ()
    return subprocess.run(
        [helm_program(), *arguments, *given], input=values, capture_output=True, text=True, check=False, timeout=60
    )


@functools.cache
def _template(files: tuple[pathlib.Path, ...], values: str, sets: tuple[str, ...]) -> str:
    named = [part for file in files for part in ("-f", str(file))]
    chosen = [part for assignment in sets for part in ("--set", assignment)]
    done = run_helm("template", RELEASE, str(CHART), "-n", NAMESPACE, *named, *chosen, values=values)
    if done.returncode:
        raise RefusedError(done.stderr)
    return done.stdout


class RefusedError(Exception):
    """Helm's words for values that it did not take."""


def render(values: str = "", *, files: Sequence[pathlib.Path] = (), sets: Sequence[str] = ()) -> Rendered:
    """Renders the chart; the same values once per run of the tests. Raises RefusedError."""
    text = _template(tuple(files), values, tuple(sets))
    return Rendered(tuple(one for one in yaml.safe_load_all(text) if one))


def refusal(values: str = "", *, files: Sequence[pathlib.Path] = (), sets: Sequence[str] = ()) -> str:
    """Why Helm refuses some values, without line breaks. Fails if it does not."""
    try:
        _template(tuple(files), values, tuple(sets))
    except RefusedError as error:
        return " ".join(str(error).split())
    raise AssertionError("these values were not refused")


SMALL = """
tls: {enabled: false}
pools:
  - name: small
    servedModelNames: [small-model, alias]
    model: {persistentVolumeClaim: {claimName: models, path: small}}
    executors: [{name: cpu}]
"""

EVERYTHING = """
tls:
  enabled: true
  existingSecrets: {gateway: gateway-tls, scheduler: scheduler-tls, executor: executor-tls}
  requireClientCertificates: true
imagePullSecrets: [{name: registry}]
commonLabels: {team: serving}
commonAnnotations: {owner: platform}
networkPolicy:
  gatewayFrom: [{namespaceSelector: {}}]
  metricsFrom: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]
  extraEgress: [{ports: [{port: 4317}]}]
gateway:
  image: {repository: registry:5000/holdback/gateway, digest: "sha256:DIGEST"}
  autoscaling: {type: hpa}
  apiKeys: {existingSecret: keys}
  ingress:
    enabled: true
    className: nginx
    hosts: [{host: llm.example.com, tlsSecret: llm-tls}, {host: plain.example.com}]
  gatewayApi:
    http: {parentRefs: [{name: public, sectionName: https}], hostnames: [llm.example.com]}
    grpc: {parentRefs: [{name: public, sectionName: grpc}], hostnames: [grpc.example.com]}
  extraEnv: [{name: GRPC_TRACE, value: "http"}]
  extraVolumes: [{name: more, emptyDir: {}}]
  extraVolumeMounts: [{name: more, mountPath: /more}]
  podLabels: {tier: front}
  podAnnotations: {note: here}
pools:
  - name: large
    servedModelNames: [large]
    model: {persistentVolumeClaim: {claimName: models}}
    tokenizer: {persistentVolumeClaim: {claimName: tokenizers, path: large}}
    executors:
      - name: cores
        device: neuron
        neuron: {resource: aws.amazon.com/neuroncore, count: 2}
        replicas: 3
        compileCache: {size: 10Gi, storageClassName: efs}
        precompile: {enabled: true}
      - name: devices
        device: neuron
        neuron: {resource: aws.amazon.com/neuron}
        autoscaling: {type: hpa, minReplicas: 2}
        compileCache: {existingClaim: compiled}
  - name: tiny
    servedModelNames: [tiny]
    model: {imagePath: /models/tiny}
    executors:
      - {name: split, tensorParallelSize: 2, autoscaling: {type: keda, keda: {serverAddress: "http://prometheus:9090"}}}
  - name: sim
    servedModelNames: [sim]
    tokenizer: {configMap: sim-tokenizer}
    executors: [{name: sim, device: simulated, replicas: 0}]
metrics:
  podMonitor: {enabled: true, labels: {release: prometheus}}
  dashboard: {enabled: true}
  alerts: {enabled: true}
helmTest: {apiKeySecret: {name: test-key}}
""".replace("DIGEST", "ab" * 32)
