"""Set-up of the checkout: what is complete and current is left alone, anything else is made again."""

from __future__ import annotations

import pathlib
import threading

import pytest

from tools import environment


class Recorder:
    """Makes a product of one file, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, folder: pathlib.Path) -> None:
        self.count += 1
        folder.mkdir()
        (folder / "made").write_text(str(self.count), encoding="utf-8")


@pytest.fixture
def link(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "product"


@pytest.fixture
def store(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "cache" / "product"


def test_a_product_is_made_once_for_one_key(link: pathlib.Path, store: pathlib.Path) -> None:
    make = Recorder()
    for _ in range(3):
        environment.publish(link, store, "k1", make)
    assert make.count == 1
    assert (link / "made").read_text(encoding="utf-8") == "1"


def test_another_key_makes_another_product_and_drops_the_old_one(link: pathlib.Path, store: pathlib.Path) -> None:
    make = Recorder()
    for key in ("k1", "k2", "k1"):
        environment.publish(link, store, key, make)
        assert [path.name for path in store.iterdir() if path.is_dir()] == [key]
    assert make.count == 3


def test_what_was_interrupted_is_made_again_and_never_taken_for_complete(
    link: pathlib.Path, store: pathlib.Path
) -> None:
    def interrupted(folder: pathlib.Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        environment.publish(link, store, "k1", interrupted)
    assert not link.exists()
    environment.publish(link, store, "k1", Recorder())
    assert [path.name for path in link.iterdir()] == ["made"]


def test_a_failure_leaves_the_product_before_it_usable(link: pathlib.Path, store: pathlib.Path) -> None:
    def failing(folder: pathlib.Path) -> None:
        raise environment.SetupError("no network")

    environment.publish(link, store, "k1", Recorder())
    with pytest.raises(environment.SetupError):
        environment.publish(link, store, "k2", failing)
    assert (link / "made").read_text(encoding="utf-8") == "1"


def test_a_product_that_somebody_removed_is_made_again(link: pathlib.Path, store: pathlib.Path) -> None:
    make = Recorder()
    environment.publish(link, store, "k1", make)
    (store / "k1" / "product" / "made").unlink()
    (store / "k1" / "product").rmdir()
    environment.publish(link, store, "k1", make)
    assert make.count == 2


def test_a_folder_that_make_did_not_make_is_left_alone(link: pathlib.Path, store: pathlib.Path) -> None:
    link.mkdir()
    (link / "precious").touch()
    with pytest.raises(environment.SetupError, match="make did not make it; move it away"):
        environment.publish(link, store, "k1", Recorder())
    assert (link / "precious").exists()


def test_two_makes_at_once_make_it_once(link: pathlib.Path, store: pathlib.Path) -> None:
    make, made, go_on = Recorder(), threading.Event(), threading.Event()

    def slow(folder: pathlib.Path) -> None:
        make(folder)
        made.set()
        assert go_on.wait(timeout=60)

    first = threading.Thread(target=environment.publish, args=(link, store, "k1", slow))
    second = threading.Thread(target=environment.publish, args=(link, store, "k1", make))
    first.start()
    assert made.wait(timeout=60)
    second.start()
    go_on.set()
    first.join(timeout=60)
    second.join(timeout=60)
    assert make.count == 1
    assert (link / "made").exists()


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("", False),
        ("global.cert='/etc/ssl/certs/ca-certificates.crt'\n:env:.default-timeout='180'\n", False),
        ("global.trusted-host='index-url=x'\n", False),
        ("global.index-url='https://example.org/simple'\n", True),
        ("install.index-url='https://example.org/simple'\n", True),
        ("global.cert='/x'\n:env:.extra-index-url='https://example.org/simple'\n", True),
        (":env:.find-links='/opt/wheels'\n", True),
        ("global.no-index='true'\n", True),
    ],
)
def test_pip_has_an_index_of_its_own_or_not(listed: str, expected: bool) -> None:
    assert environment.has_index(listed) is expected


def test_a_named_index_of_torch_wins_over_what_pip_has() -> None:
    assert environment.where_torch_comes_from("https://example.org/cpu") == "https://example.org/cpu"
    assert environment.where_torch_comes_from("pip") is None


def test_the_hash_tells_contents_apart(tmp_path: pathlib.Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a", encoding="utf-8")
    two.write_text("b", encoding="utf-8")
    digests = {
        environment.digest([one], "x"),
        environment.digest([two], "x"),
        environment.digest([one, two], "x"),
        environment.digest([two, one], "x"),
        environment.digest([one], "y"),
        environment.digest([one], "x", ""),
    }
    assert len(digests) == 6


def test_each_phase_is_told_before_it_begins(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    monkeypatch.setattr(environment, "run", lambda *command: told.append(capsys.readouterr().err.strip()))
    environment.install(tmp_path, "https://example.org/cpu")
    assert [line.split(";")[0] for line in told] == [
        "an empty virtual environment ...",
        "torch from https://example.org/cpu",
        "Holdback and its development tools",
    ]
