"""Lints and renders the chart with every example, and checks what comes out against the schemas of Kubernetes.

    python tools/check_chart.py

Core manifests are checked for each version of Kubernetes that the chart is made for, strictly: a key that Kubernetes
does not know is refused. Custom resources are checked against the schemas in tests/chart/crds. hadolint reads the
Dockerfile. Ends with 1 and the list of problems if there are any.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHART = ROOT / "k8s" / "chart"
EXAMPLES = ROOT / "k8s" / "examples"
DOCKERFILE = ROOT / "k8s" / "images" / "Dockerfile"
CRDS = ROOT / "tests" / "chart" / "crds"
KUBERNETES_VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35")
CORE_GROUPS = ("apps", "autoscaling", "batch", "networking.k8s.io", "policy")

Manifest = dict[str, Any]


def main() -> int:
    problems = [*check_examples(), *lint_dockerfile()]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def check_examples() -> Iterator[str]:
    for example in sorted(EXAMPLES.glob("*.yaml")):
        lint = helm("lint", "--strict", str(CHART), "-f", str(example))
        if lint.returncode:
            yield f"{example.name}: {lint.stdout}{lint.stderr}"
            continue
        rendered = helm("template", "holdback", str(CHART), "-n", "serving", "-f", str(example))
        if rendered.returncode:
            yield f"{example.name}: {rendered.stderr}"
            continue
        manifests = [one for one in yaml.safe_load_all(rendered.stdout) if one]
        for manifest in manifests:
            yield from (f"{example.name}: {problem}" for problem in check_manifest(manifest))
        print(f"{example.name}: {len(manifests)} manifests, Kubernetes {', '.join(KUBERNETES_VERSIONS)}")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = os.environ.get("HOLDBACK_HELM") or str(ROOT / ".cache" / "helm" / "helm")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def check_manifest(manifest: Manifest, versions: Sequence[str] = KUBERNETES_VERSIONS) -> list[str]:
    """What is wrong with a manifest, each as one sentence that names it."""
    group = manifest["apiVersion"].rpartition("/")[0]
    name = f"{manifest['kind']} {manifest['metadata']['name']}"
    if group and group not in CORE_GROUPS:
        return [f"{name}: {problem}" for problem in check_custom(manifest, group)]
    return [
        f"{name}: Kubernetes {version}: {problem}" for version in versions for problem in check_core(manifest, version)
    ]


def check_core(manifest: Manifest, version: str) -> list[str]:
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        return [f"{error.message} at {'.'.join(map(str, getattr(error, 'path', [])))}"]
    return []


def check_custom(manifest: Manifest, group: str) -> list[str]:
    path = CRDS / f"{group}_{manifest['kind']}.json"
    if not path.is_file():
        return [f"there is no {path.name} to check it against"]
    return [
        f"{error.message} at {'.'.join(map(str, error.path))}" for error in crd_validator(path).iter_errors(manifest)
    ]


@functools.cache
def crd_validator(path: pathlib.Path) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(path.read_text(encoding="utf-8")))


def lint_dockerfile() -> list[str]:
    program = pathlib.Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(program), str(DOCKERFILE)], capture_output=True, text=True, check=False)
    return [done.stdout + done.stderr] if done.returncode else []


if __name__ == "__main__":
    sys.exit(main())
