"""Checks what of the images can be checked without Docker.

    python tools/check_images.py [--write]

Every COPY must have its source and every stage that it names. The commands of the stages that make the wheel and the
environments of the CPU images are run in empty virtual environments, changed only by a table that is printed; then the
commands must start, packages must fit each other, scheduler and gateway must have no torch, and every package must be
pinned. `--write` pins them, in k8s/images/constraints.txt. What was not run is printed: base images, users, and the
whole Neuron image.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import environment  # noqa: E402 - a script does not find its own package

DOCKERFILE = ROOT / "k8s" / "images" / "Dockerfile"
PULLED_IN = ROOT / "k8s" / "images" / "constraints.txt"
CPU_TARGETS = {"gateway": "gateway", "scheduler": "scheduler", "executor-cpu": "executor"}
"""Images whose environment is made here, and the command of each."""
WITHOUT_TORCH = ("gateway", "scheduler")
UNPINNED = {"holdback", "pip", "setuptools"}
"""Our own, and what the base image brings."""


@dataclasses.dataclass
class Stage:
    """Of the Dockerfile: its instructions, each with its text, continued lines joined."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def of(self, word: str) -> list[str]:
        return [text for name, text in self.instructions if name == word]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="pin what was installed")
    is_write = parser.parse_args().write
    stages = read_stages(DOCKERFILE.read_text(encoding="utf-8"))
    problems = list(check_copies(stages))
    with tempfile.TemporaryDirectory(prefix="holdback-images-") as name:
        found = make_environments(stages, pathlib.Path(name), is_write=is_write)
        problems += found
    print_not_run(stages)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def read_stages(text: str) -> dict[str, Stage]:
    """The stages by name, in order."""
    stages: dict[str, Stage] = {}
    stage = Stage("", "")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for instruction in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        word, _, rest = instruction.partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stage = stages[name] = Stage(name, base)
        else:
            stage.instructions.append((word, rest.strip()))
    return stages


def check_copies(stages: dict[str, Stage]) -> Iterator[str]:
    """What a COPY names and is not there, as far as it comes from this tree or from a stage."""
    earlier: list[str] = []
    for stage in stages.values():
        for copy in stage.of("COPY"):
            *sources, _ = [word for word in copy.split() if not word.startswith("--")]
            origin = re.search(r"--from=(\S+)", copy)
            if origin and origin[1] not in earlier:
                yield f"{stage.name}: COPY {copy}: there is no stage {origin[1]} before it"
            if not origin:
                yield from (f"{stage.name}: COPY {copy}: no {one}" for one in sources if not (ROOT / one).exists())
        earlier.append(stage.name)


def make_environments(stages: dict[str, Stage], folder: pathlib.Path, *, is_write: bool) -> list[str]:
    """Makes the wheel and each environment as the Dockerfile says; returns what is wrong with them."""
    builder = Builder(stages, folder)
    builder.make_wheel()
    installed: dict[str, str] = {}
    problems: list[str] = []
    for target, command in CPU_TARGETS.items():
        own = builder.make_environment(target)
        problems += check_environment(target, command, builder.environment, own)
        installed |= own
    if is_write:
        write_pins(installed)
    return problems + [
        f"{name}=={installed[name]} is pinned nowhere; run: check_images.py --write"
        for name in sorted(installed.keys() - pinned_names() - UNPINNED)
    ]


class Builder:
    """Runs the commands of stages with the folders of `table` in the place of the image's."""

    def __init__(self, stages: dict[str, Stage], folder: pathlib.Path) -> None:
        self._stages = stages
        self._folder = folder
        self.environment = folder / "environment"
        index = environment.where_torch_comes_from("auto")
        self.table = {
            "/src": str(folder / "src"),
            "/wheels": str(folder / "wheels"),
            "/build": str(folder / "build"),
            "/opt/holdback": str(self.environment),
            '--index-url "${TORCH_INDEX}"': f"--index-url {index}" if index else "",
        }
        print("replaced in the commands of the stages:")
        for there, here in (*self.table.items(), ("PIP_INDEX_URL", "pip's own configuration")):
            print(f"  {there} -> {here or 'nothing'}")

    def make_wheel(self) -> None:
        """In an environment that has pip alone, as the base image."""
        stage = self._stages["wheel"]
        self._copy(stage, self._folder / "src")
        base = self._folder / "base"
        environment.run(sys.executable, "-m", "venv", base)
        self._run(stage, self._folder / "src", base)

    def make_environment(self, target: str) -> dict[str, str]:
        """Versions of what is installed, by name. The environment made before is gone."""
        shutil.rmtree(self.environment, ignore_errors=True)
        base, stage = self._stages["environment"], self._stages[f"{target}-environment"]
        build = self._folder / "build"
        self._copy(base, build)
        self._run(base, build, self._folder / "base")
        self._run(stage, build, self._folder / "base")
        listed = run_in(self.environment, "-m", "pip", "--disable-pip-version-check", "list", "--format=freeze")
        return {normal(name): version for name, _, version in (line.partition("==") for line in listed.splitlines())}

    def _copy(self, stage: Stage, folder: pathlib.Path) -> None:
        folder.mkdir(exist_ok=True)
        for copy in stage.of("COPY"):
            if copy.startswith("--from"):
                continue
            *sources, destination = copy.split()
            for source in sources:
                to = folder / (pathlib.Path(source).name if destination == "./" else destination)
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, to, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / source, to)

    def _run(self, stage: Stage, folder: pathlib.Path, base: pathlib.Path) -> None:
        path = f"{base / 'bin'}:{os.environ['PATH']}"
        for command in stage.of("RUN"):
            text = command
            for there, here in self.table.items():
                text = text.replace(there, here)
            print(f"{stage.name}: {command}", flush=True)
            variables = os.environ | {"PATH": path, "PIP_QUIET": "2", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
            subprocess.run(["/bin/sh", "-ec", text], check=True, cwd=folder, env=variables)


def check_environment(target: str, command: str, folder: pathlib.Path, installed: dict[str, str]) -> Iterator[str]:
    for arguments in ((str(folder / "bin" / "holdback"), command, "--help"), (str(folder / "bin" / "pip"), "check")):
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"{target}: {' '.join(arguments[1:])}: {done.stdout}{done.stderr}"
    if target in WITHOUT_TORCH and "torch" in installed:
        yield f"{target}: has torch {installed['torch']}"
    print(f"{target}: {len(installed)} packages, {megabytes(folder)} MB")


def run_in(folder: pathlib.Path, *arguments: str) -> str:
    return subprocess.run([folder / "bin" / "python", *arguments], check=True, capture_output=True, text=True).stdout


def megabytes(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 2**20


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned_names() -> set[str]:
    texts = [path.read_text(encoding="utf-8") for path in (environment.CONSTRAINTS, PULLED_IN) if path.exists()]
    return {normal(name) for text in texts for name in re.findall(r"^([\w.-]+)==", text, re.MULTILINE)}


def write_pins(installed: dict[str, str]) -> None:
    """Pins what constraints.txt does not."""
    direct = {
        normal(name)
        for name in re.findall(r"^([\w.-]+)==", environment.CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    }
    lines = [f"{name}=={installed[name]}" for name in sorted(installed.keys() - direct - UNPINNED)]
    head = "# What the packages of constraints.txt pull into the images. Written by tools/check_images.py --write.\n"
    PULLED_IN.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


def print_not_run(stages: dict[str, Stage]) -> None:
    print("not run:")
    print("  base images, users and entry points: there is no Docker here")
    neuron = stages["executor-neuron"]
    for word, text in [("FROM", neuron.base), *neuron.instructions]:
        print(f"  executor-neuron: {word} {text}")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
