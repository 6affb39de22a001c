"""`import holdback` gives the SDK by name and loads nothing that is not asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import holdback
from holdback import answers, client, errors, options, streaming, sync_client, tls, types


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after a statement."""
    program = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement", ["import holdback", "import holdback.types, holdback.errors", "from holdback import FinishReason"]
)
def test_names_that_need_no_grpc_load_none(statement: str) -> None:
    assert loaded_by(statement).isdisjoint({"grpc", "google", "torch", "pydantic", "asyncio"})


def test_the_client_loads_grpc_and_no_torch() -> None:
    loaded = loaded_by("from holdback import AsyncClient")
    assert "grpc" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "tokenizers"})


def test_every_public_name_is_that_of_its_module() -> None:
    modules = (answers, client, errors, options, streaming, sync_client, tls, types)
    for name in holdback.__all__:
        value = getattr(holdback, name)
        assert value.__module__ in {module.__name__ for module in modules}
        assert value.__name__ == name


def test_all_errors_are_public() -> None:
    names = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert names <= set(holdback.__all__)


def test_names_are_listed_and_others_are_not_there() -> None:
    assert set(holdback.__all__) <= set(dir(holdback))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        holdback.Nothing  # noqa: B018
