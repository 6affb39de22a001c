"""Flags win over the environment, the environment over the file; what no field has is refused in all three."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any, ClassVar

import pydantic
import pytest

from holdback.config import ServiceConfig
from holdback.errors import ConfigError


class Pool(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: str


class ExampleConfig(ServiceConfig):
    process: ClassVar[str] = "example"

    model: pathlib.Path = pydantic.Field(description="directory of the model")
    timeout_s: float = pydantic.Field(5.0, gt=0, description="seconds, 100 % of them")
    prefix_cache: bool = pydantic.Field(True, description="reuse blocks")
    max_model_len: int | None = pydantic.Field(None, ge=2, description="most tokens")
    buckets: tuple[int, ...] = pydantic.Field((128, 256), description="shapes")
    pools: list[Pool] = pydantic.Field(default_factory=list, description="pools")


def load(*argv: str, environment: dict[str, str] | None = None) -> ExampleConfig:
    return ExampleConfig.load(["--model", "/m", *argv], environment or {})


@pytest.fixture
def config_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "holdback.yaml"
    path.write_text("timeout_s: 1.0\nport: 1000\nmax_model_len: 64\n", encoding="utf-8")
    return path


def test_what_nobody_sets_has_its_default() -> None:
    config = load()
    assert (config.host, config.port, config.log_level, config.timeout_s) == ("127.0.0.1", 0, "info", 5.0)
    assert config.buckets == (128, 256)


def test_flags_win_over_the_environment_and_that_over_the_file(config_file: pathlib.Path) -> None:
    environment = {"HOLDBACK_EXAMPLE__PORT": "2000", "HOLDBACK_EXAMPLE__TIMEOUT_S": "2.0"}
    config = load("--config", str(config_file), "--timeout-s", "3.0", environment=environment)
    assert (config.timeout_s, config.port, config.max_model_len) == (3.0, 2000, 64)


def test_a_flag_of_a_boolean_has_a_no_form_that_wins_over_the_environment() -> None:
    assert load(environment={"HOLDBACK_EXAMPLE__PREFIX_CACHE": "false"}).prefix_cache is False
    assert load("--prefix-cache", environment={"HOLDBACK_EXAMPLE__PREFIX_CACHE": "false"}).prefix_cache is True
    assert load("--no-prefix-cache").prefix_cache is False


def test_null_is_absent_in_flag_environment_and_file(config_file: pathlib.Path) -> None:
    assert load("--config", str(config_file), "--max-model-len", "null").max_model_len is None
    from_environment = load("--config", str(config_file), environment={"HOLDBACK_EXAMPLE__MAX_MODEL_LEN": "null"})
    assert from_environment.max_model_len is None
    config_file.write_text("max_model_len: null\n", encoding="utf-8")
    assert load("--config", str(config_file)).max_model_len is None


def test_lists_and_mappings_are_json_in_flags_and_environment() -> None:
    assert load("--buckets", "[16, 32]").buckets == (16, 32)
    assert load(environment={"HOLDBACK_EXAMPLE__POOLS": '[{"name": "a"}]'}).pools == [Pool(name="a")]


def test_variables_of_other_processes_are_not_looked_at() -> None:
    environment = {"HOLDBACK_GATEWAY__NONSENSE": "1", "HOLDBACK_EXAMPLE_SERVICE_HOST": "10.0.0.1", "PATH": "/bin"}
    assert load(environment=environment) == load()


def test_an_empty_file_sets_nothing(config_file: pathlib.Path) -> None:
    config_file.write_text("# nothing yet\n", encoding="utf-8")
    assert load("--config", str(config_file)) == load()


@pytest.mark.parametrize(
    ("argv", "environment", "message"),
    [
        (["--port", "70000"], {}, "port is '70000'; input should be less than or equal to 65535"),
        (["--port", "abc"], {}, "port is 'abc'; input should be a valid integer, unable to parse string as an integer"),
        (["--timeout-s", "0"], {}, "timeout_s is '0'; input should be greater than 0"),
        (["--timeout-s", "inf"], {}, "timeout_s is 'inf'; input should be a finite number"),
        (["--timeout-s", "nan"], {}, "timeout_s is 'nan'; input should be a finite number"),
        (["--log-level", "loud"], {}, "log_level is 'loud'; input should be 'debug', 'info', 'warning' or 'error'"),
        (["--host", "localhost"], {}, "host is 'localhost'; allowed: a literal IP address"),
        (
            ["--host", "0.0.0.0"],  # noqa: S104 - refused here
            {},
            "host is 0.0.0.0, which is not loopback; allowed: with tls_cert and tls_key, or --insecure-bind",
        ),
        (["--buckets", "[16, x"], {}, "buckets is '[16, x'; input should be a valid tuple"),
        (["--pools", '[{"name": "a", "nmae": "b"}]'], {}, "pools.0.nmae is not known"),
        (["--pools", "[{}]"], {}, "pools.0.name is required"),
        ([], {"HOLDBACK_EXAMPLE__PORT": "-1"}, "port is '-1'; input should be greater than or equal to 0"),
        (
            [],
            {"HOLDBACK_EXAMPLE__TIMEOUT": "1"},
            "environment variable HOLDBACK_EXAMPLE__TIMEOUT is not known; did you mean 'timeout_s'?",
        ),
        (
            ["--port", "70000", "--timeout-s", "-1"],
            {},
            "port is '70000'; input should be less than or equal to 65535; "
            "timeout_s is '-1'; input should be greater than 0",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_limit(
    argv: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(*argv, environment=environment)
    assert refused.value.message == message


def test_a_missing_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^model is required$"):
        ExampleConfig.load([], {})


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as refused:
        load("--port", "9" * 5000)
    assert len(refused.value.message) < 250
    assert "999..." in refused.value.message


def test_another_address_than_loopback_needs_a_word() -> None:
    assert load("--host", "0.0.0.0", "--insecure-bind").host == "0.0.0.0"  # noqa: S104 - the flag under test
    assert load("--host", "::1").host == "::1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"timeout_s: 1\ntimeoutt: 2\n", r"key 'timeoutt' is not known; did you mean 'timeout_s'\?$"),
        (b"timeout-s: 1\n", r"key 'timeout-s' is not known; did you mean 'timeout_s'\?$"),
        (b"zzz: 1\n", "key 'zzz' is not known; known: .*health_port.*timeout_s"),
        (b"- a\n- b\n", "a mapping of keys to values is needed, not list$"),
        (b"port: [1\n", "not YAML: "),
        (b"\xff\xfe\xfa", "not YAML: "),
        (b"!!python/object/apply:os.system ['true']\n", "not YAML: "),
        (b"[" * 1000, "not YAML: "),
        (b"port: 1\nport: 2\n", "the key 'port' stands twice"),
        (b"port: 70000\n", "port is 70000; input should be less than or equal to 65535$"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: pathlib.Path, content: bytes, message: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load("--config", str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*absent.yaml: No such file or directory$"):
        load("--config", str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--timeout", "1"], "--timeout is not known; did you mean --timeout-s?"),
        (["--portt=5"], "--portt=5 is not known; did you mean --port?"),
        (["--zzz"], "--zzz is not known; --help lists what is"),
        (["--port", "1", "stray"], "'stray' follows no flag"),
        (["--port"], "--port: expected one argument"),
        (
            ["--prefix-cache", "maybe"],
            "--prefix-cache takes no value, and has 'maybe'; allowed: --prefix-cache, or --no-prefix-cache",
        ),
    ],
)
def test_a_wrong_flag_is_refused_in_a_sentence_and_not_guessed(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(*argv)
    assert refused.value.message == message
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", ["port: true\n", "timeout_s: false\n", "buckets: [16, true]\n"])
def test_a_boolean_is_no_number(tmp_path: pathlib.Path, content: str) -> None:
    path = tmp_path / "booleans.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^(port|timeout_s|buckets) is .*(true|false)\]?; allowed: no boolean$"):
        load("--config", str(path))
    path.write_text("prefix_cache: false\n", encoding="utf-8")
    assert load("--config", str(path)).prefix_cache is False


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ("port: 1\nport: 2\n", "line 1, column 1: the key 'port' stands twice"),
        ("port: 1\nhost: {{\n", "line 3, column 1: "),
        ("? [a, b]\n: 1\n", "found unhashable key"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(tmp_path: pathlib.Path, content: str, where: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load("--config", str(path))
    assert where in refused.value.message
    assert "\n" not in refused.value.message


def test_the_help_tells_the_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--help")
    assert ended.value.code == 0
    assert "HOLDBACK_EXAMPLE__LOG_LEVEL for --log-level" in " ".join(capsys.readouterr().out.split())


def test_help_shows_each_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "--timeout-s VALUE seconds, 100 % of them (default: 5.0)" in text
    assert "--pools VALUE pools (default: [])" in text
    assert "--model VALUE directory of the model --" in text
    assert "--prefix-cache, --no-prefix-cache" in text


def test_a_configuration_does_not_change_after_it_is_loaded() -> None:
    config: Any = load()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.port = 1


def test_a_field_may_read_its_own_text_form() -> None:
    class SplitConfig(ServiceConfig):
        process: ClassVar[str] = "split"
        names: Annotated[tuple[str, ...], pydantic.BeforeValidator(lambda value: value.split(","))] = ()

    assert SplitConfig.load(["--names", "a,b"], {}).names == ("a", "b")
