"""Asks pip whether everything that a user installs is to be had for the Pythons that nothing here runs on.

    .venv/bin/python tools/other_pythons.py [VERSION ...]

For each version pip resolves the requirements of all extras that a laptop can install, for wheels alone and without
installing. torch is only looked up by its pin and what needs torch is resolved without its dependencies: resolving
torch's own would download gigabytes of GPU libraries from an index that does not serve metadata apart.

Not covered: whether anything works on that Python, and requirements whose environment marker depends on the version of
Python, since pip evaluates markers for the Python that it runs on.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
VERSIONS = ("3.12", "3.13", "3.14")
EXTRAS = ("scheduler", "gateway", "executor")
NEEDS_TORCH = frozenset({"accelerate"})
ONLY_WHEELS = "--only-binary=:all:"


def main() -> int:
    failed = False
    for version in sys.argv[1:] or VERSIONS:
        try:
            print(f"Python {version}: {ask(version)}", flush=True)
        except subprocess.CalledProcessError as error:
            failed = True
            print(f"Python {version}: pip says no\n{error.stderr.strip()}", file=sys.stderr, flush=True)
    return 1 if failed else 0


def ask(version: str) -> str:
    """What pip found, in a sentence. Raises CalledProcessError when it finds something missing."""
    required = requirements()
    lone = [line for line in required if name_of(line) in NEEDS_TORCH]
    rest = [line for line in required if name_of(line) not in NEEDS_TORCH | {"torch"}]
    found = resolve(version, rest) + resolve(version, ["--no-deps", *lone])
    pin = pinned_torch()
    listed = json.loads(run_pip("index", "versions", "torch", "--json", "--python-version", version, ONLY_WHEELS))
    if pin not in listed["versions"]:
        raise subprocess.CalledProcessError(1, "pip index", stderr=f"torch {pin} is not among {listed['versions']}")
    return f"wheels for all {found} distributions, and for torch {pin}"


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    lines: list[str] = project["dependencies"] + [line for extra in EXTRAS for line in optional[extra]]
    return sorted(set(lines))


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def pinned_torch() -> str:
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return next(line.removeprefix("torch==") for line in lines if line.startswith("torch=="))


def resolve(version: str, arguments: list[str]) -> int:
    """The number of distributions that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        where = ["--target", str(pathlib.Path(folder) / "none"), "--python-version", version, ONLY_WHEELS]
        run_pip("install", "-q", "--dry-run", "--report", str(report), *where, "-c", str(CONSTRAINTS), *arguments)
        return len(json.loads(report.read_text(encoding="utf-8"))["install"])


def run_pip(*arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL).stdout


if __name__ == "__main__":
    sys.exit(main())
