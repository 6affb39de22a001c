"""`--case B07` runs the tests of that case alone, and fails when there is none."""

from __future__ import annotations

import pathlib

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

@pytest.mark.case("B07")
def test_seven(): pass

@pytest.mark.case("B07", "B08")
def test_seven_and_eight(): pass

@pytest.mark.case("B08")
@pytest.mark.case("B09")
def test_eight_and_nine(): pass

def test_none(): pass
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    conftest = pathlib.Path(__file__).resolve().parents[1] / "conftest.py"
    pytester.makeconftest(conftest.read_text(encoding="utf-8"))
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers =\n    case(id): a case\n")
    pytester.makepyfile(TESTS)
    return pytester


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("B07", ["test_seven", "test_seven_and_eight"]),
        ("B08", ["test_seven_and_eight", "test_eight_and_nine"]),
        ("B09", ["test_eight_and_nine"]),
    ],
)
def test_only_the_tests_of_the_case_run(project: pytest.Pytester, case: str, names: list[str]) -> None:
    result = project.runpytest_inprocess("--case", case, "-v")
    result.assert_outcomes(passed=len(names), deselected=4 - len(names))
    result.stdout.fnmatch_lines([f"*::{name} PASSED*" for name in names])


def test_a_case_without_a_test_is_an_error_that_names_the_others(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("--case", "B7")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*no test carries case 'B7'; there are: B07, B08, B09"])


def test_without_the_option_everything_runs(project: pytest.Pytester) -> None:
    project.runpytest_inprocess().assert_outcomes(passed=4)


def test_a_marker_that_is_no_case_number_is_an_error(project: pytest.Pytester) -> None:
    project.makepyfile(test_wrong='import pytest\n\n@pytest.mark.case("7")\ndef test_wrong(): pass\n')
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*case '7' is no case number such as 'B07'"])
