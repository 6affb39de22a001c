"""What all tests share: the choice of tests by case, and the real model.

`pytest --case B07` runs the tests that carry `@pytest.mark.case("B07")` and fails when there are none. A test may carry
several ids, in one marker or in several.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import signal
from collections.abc import Iterator

import hypothesis
import pytest

from tests import leftovers

ROOT = pathlib.Path(__file__).resolve().parent.parent
CASE_ID = re.compile(r"B\d{2}")


# On a loaded machine an example may take any time.
hypothesis.settings.register_profile("holdback", deadline=None)
hypothesis.settings.load_profile("holdback")


def pytest_configure() -> None:
    # Started in the background of a script, everything below here would ignore Ctrl-C, and the tests of that with it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--case", metavar="ID", help="run only the tests of this case, for example B07")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_without_device(items)
    cases = {item.nodeid: case_ids(item) for item in items}
    wanted = config.getoption("--case")
    if wanted is None:
        return
    chosen = [item for item in items if wanted in cases[item.nodeid]]
    if not chosen:
        known = sorted(set().union(*cases.values()))
        raise pytest.UsageError(f"no test carries case {wanted!r}; there are: {', '.join(known) or 'none'}")
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def skip_without_device(items: list[pytest.Item]) -> None:
    """Tests that need a NeuronCore, where there is none: listed as skipped, never left out."""
    if importlib.util.find_spec("torch_neuronx") is None:
        reason = "needs a NeuronCore and torch-neuronx, which is not installed; docs/neuron.md says how to run it"
        for item in items:
            if item.get_closest_marker("neuron") is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def case_ids(item: pytest.Item) -> set[str]:
    """The cases that a test stands for. Raises UsageError for anything that is not a case number."""
    ids = [case for marker in item.iter_markers("case") for case in marker.args]
    for case in ids:
        if not isinstance(case, str) or CASE_ID.fullmatch(case) is None:
            raise pytest.UsageError(f"{item.nodeid}: case {case!r} is no case number such as 'B07'")
    return set(ids)


@pytest.fixture(autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    """A test that fails before it has stopped what it started must not leave it running beside those that follow."""
    before = leftovers.running()
    yield
    leftovers.end(leftovers.running() - before)


@pytest.fixture(scope="session")
def model_directory() -> pathlib.Path:
    """The converted SmolLM2-135M, in Hugging Face layout. `make test` makes it; without it the test fails."""
    path = pathlib.Path(os.environ.get("HOLDBACK_TEST_MODEL", ROOT / ".cache" / "models" / "smollm2-135m"))
    if not (path / "config.json").is_file():
        pytest.fail(f"no model in {path}; make it with: make model", pytrace=False)
    return path
