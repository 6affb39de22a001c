"""The project keeps what its files promise: packages, stubs, layering, documents, the licence."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from tools import environment, other_pythons, typescript_client

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
OF_TOOLS = {
    environment.MODEL_PACKAGE,
    environment.HELM_PACKAGE,
    *environment.LOWERING_PACKAGES,
    typescript_client.NODE_PACKAGE,
}
SHIPPED = ("holdback", "scheduler_svc", "executor_svc", "gateway")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )


def test_every_package_of_the_tree_is_listed(pyproject: dict[str, Any]) -> None:
    folders = {path.parent for name in SHIPPED for path in (ROOT / name).rglob("*.py")}
    packages = sorted(".".join(folder.relative_to(ROOT).parts) for folder in folders)
    assert sorted(pyproject["tool"]["setuptools"]["packages"]) == packages


def test_every_command_leads_to_a_function(pyproject: dict[str, Any]) -> None:
    from holdback import cli

    targets = pyproject["project"]["entry-points"]["holdback.commands"] | cli.OWN_COMMANDS
    for name, target in targets.items():
        assert callable(cli.load(target)), name
        assert name in cli.SUMMARIES


def test_the_generated_stubs_are_current() -> None:
    done = run("protos/generate.py", "--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stub_that_is_not_current_is_found(tmp_path: pathlib.Path) -> None:
    (tmp_path / "protos").mkdir()
    (tmp_path / "protos" / "generate.py").write_bytes((ROOT / "protos" / "generate.py").read_bytes())
    for folder in ("protos/holdback/v1", "holdback/v1"):
        (tmp_path / folder).mkdir(parents=True)
        for path in (ROOT / folder).glob("*.p*"):
            (tmp_path / folder / path.name).write_bytes(path.read_bytes())
    with (tmp_path / "protos/holdback/v1/types.proto").open("a", encoding="utf-8") as proto:
        proto.write("\n// Added.\nmessage Added {}\n")
    (tmp_path / "holdback/v1/gone_pb2.py").touch()
    done = run(str(tmp_path / "protos" / "generate.py"), "--check")
    assert done.returncode == 1
    assert done.stderr == "not current: gone_pb2.py, types_pb2.py, types_pb2.pyi; run: make generate\n"


def test_services_and_core_import_only_what_they_may() -> None:
    done = run("-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))")
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


def test_every_pin_names_something_that_is_required(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    lines = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    required = {other_pythons.name_of(line) for line in lines} | OF_TOOLS
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pins
    assert {name.lower() for name in pins} <= required


def test_torch_is_pinned_for_the_development_environment_only(pyproject: dict[str, Any]) -> None:
    assert other_pythons.pinned_torch() == "2.13.0"
    neuron = pyproject["project"]["optional-dependencies"]["neuron"]
    assert not any(other_pythons.name_of(line) == "torch" for line in neuron)


def test_the_readme_starts_with_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^make [a-z-]+", text, re.MULTILINE)[:2] == ["make demo", "make test"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_between_documents_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    missing = [link for link in links if not (ROOT / document).parent.joinpath(link).exists()]
    assert missing == []


def test_the_licence_is_apache_2_in_full(pyproject: dict[str, Any]) -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert pyproject["project"]["license"] == "Apache-2.0"
