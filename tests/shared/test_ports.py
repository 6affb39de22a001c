"""The ports file: a whole one or none."""

from __future__ import annotations

import json
import pathlib

import pytest

from holdback.errors import ConfigError
from holdback.ports import write_ports_file


def test_the_ports_are_written_as_json_and_nothing_else_is_left(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ports.json"
    path.write_text("of a process before", encoding="utf-8")
    write_ports_file(path, 7000, 7001)
    assert json.loads(path.read_text(encoding="utf-8")) == {"port": 7000, "health_port": 7001}
    assert list(tmp_path.iterdir()) == [path]


def test_a_reader_never_sees_half_a_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ports.json"
    seen: list[bool] = []
    replace = pathlib.Path.replace

    def look_before(unfinished: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        seen.append(target.exists())
        assert json.loads(unfinished.read_text(encoding="utf-8"))["port"] == 7000
        return replace(unfinished, target)

    monkeypatch.setattr(pathlib.Path, "replace", look_before)
    write_ports_file(path, 7000, 7001)
    assert seen == [False]


def test_a_directory_that_is_not_there_is_an_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"ports_file is .*No such file"):
        write_ports_file(tmp_path / "missing" / "ports.json", 7000, 7001)
