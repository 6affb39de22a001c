"""docs/sdk.md: each example runs against the mock gateway and prints what the page says."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import pytest
import trustme

from holdback import errors
from holdback.errors import InvalidArgumentError
from holdback.testing import Answer, MockGateway

pytestmark = pytest.mark.loopback

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "sdk.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(
    r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE
)
ANSWERS = {
    "A first answer": [Answer(" Par", "is.")],
    "Streaming": [Answer(" Par", "is.")],
    "Chat": [Answer("Paris."), Answer("Rome.")],
    "asyncio": [Answer("Par", "is."), Answer("Par", "is.")],
    "Errors": [Answer(error=InvalidArgumentError.of("sampling.top_p", 1.5, "[0, 1]"))],
    "Several gateways": [Answer(" Paris.")],
    "TLS and API keys": [],
    "Testing your own program": [],
}
examples = {title: (source, output) for title, source, output in EXAMPLE.findall(PAGE)}


@pytest.fixture
def gateway(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MockGateway]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDBACK_API_KEY", "key-1")
    trustme.CA().cert_pem.write_to_path("ca.pem")
    with MockGateway() as gateway:
        yield gateway


def test_every_example_is_known() -> None:
    assert list(examples) == list(ANSWERS)
    assert PAGE.count("```python") == len(ANSWERS)


@pytest.mark.parametrize("title", ANSWERS)
def test_an_example_prints_what_the_page_says(
    title: str, gateway: MockGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.script(*ANSWERS[title])
    source, output = examples[title]
    source = source.replace("127.0.0.1:50051", gateway.address).replace("127.0.0.1:50061", "127.0.0.1:1")
    exec(compile(source, title, "exec"), {"__name__": "__main__"})  # noqa: S102 - the page's own code
    assert capsys.readouterr().out == output


def test_every_error_is_explained() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    listed = set(re.findall(r"^\| `(\w+Error)`", PAGE, re.MULTILINE))
    assert listed == raised - {"HoldbackError"}
