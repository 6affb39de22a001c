"""Generates the Python stubs of `protos/` into `holdback/v1/`, or with `--check` tells whether they are current.

python protos/generate.py            writes holdback/v1/*_pb2.py, *_pb2_grpc.py and their .pyi
python protos/generate.py --check    exits 1 and names the files that differ
"""

from __future__ import annotations

import argparse
import filecmp
import pathlib
import shutil
import sys
import sysconfig
import tempfile

from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = pathlib.Path("holdback") / "v1"


def generate(destination: pathlib.Path) -> None:
    """Writes all stubs below `destination`. Raises RuntimeError when protoc refuses a file."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / PACKAGE).glob("*.proto"))
    plugins = ("python_out=", "grpc_python_out=", "mypy_out=quiet:", "mypy_grpc_out=quiet:")
    outputs = [f"--{plugin}{destination}" for plugin in plugins]
    # The generators of this environment, whether or not it is the one on PATH.
    scripts = pathlib.Path(sysconfig.get_path("scripts"))
    found = [f"--plugin={name}={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    if protoc.main(["protoc", f"-I{PROTOS}", *found, *outputs, *sources]) != 0:
        raise RuntimeError(f"protoc refused one of {sources}")


def stale_files() -> list[str]:
    """Names of generated files that are missing, left over, or differ from what the protos give."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = pathlib.Path(folder)
        generate(fresh)
        names = {path.name for base in (fresh, ROOT) for path in (base / PACKAGE).glob("*_pb2*")}
        return sorted(
            name
            for name in names
            if not (fresh / PACKAGE / name).exists()
            or not (ROOT / PACKAGE / name).exists()
            or not filecmp.cmp(fresh / PACKAGE / name, ROOT / PACKAGE / name, shallow=False)
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the stubs are not current")
    if parser.parse_args().check:
        stale = stale_files()
        if stale:
            print(f"not current: {', '.join(stale)}; run: make generate", file=sys.stderr)
        return 1 if stale else 0
    with tempfile.TemporaryDirectory() as folder:
        generate(pathlib.Path(folder))
        for old in (ROOT / PACKAGE).glob("*_pb2*"):
            old.unlink()
        for path in (pathlib.Path(folder) / PACKAGE).iterdir():
            shutil.copy(path, ROOT / PACKAGE / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
