"""Where the kernels cannot be built or run, PyTorch computes, and the reason is said."""

from __future__ import annotations

import pathlib

import pytest

from executor_svc import kernels
from executor_svc.kernels.build import BuildError, build, find_missing_features
from executor_svc.processors import default_num_threads
from tests.executor.tiny_models import build_device, save_model
from tests.executor.wide_models import run_logits, wide_llama

NO_KERNELS = find_missing_features()
needs_kernels = pytest.mark.skipif(bool(NO_KERNELS), reason=f"the processor lacks {', '.join(NO_KERNELS)}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("models") / "wide", wide_llama())


def test_a_processor_that_lacks_something_is_told_by_name(tmp_path: pathlib.Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: avx2 fma bmi2 avx512f avx512bw avx512dq avx512vl\n\nprocessor : 1\n")
    assert find_missing_features(info) == ["avx512_bf16"]
    assert "avx512f" in find_missing_features(tmp_path / "absent")


def test_without_a_compiler_pytorch_runs_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, llama: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(kernels, "find_missing_features", list)
    device = build_device(llama, dtype="bfloat16", kernels_directory=tmp_path)
    reason = "PyTorch, for the kernels cannot be built: there is no C++ compiler 'no-such-compiler', as CXX says"
    assert device.kernels == f"{reason}; threads: {default_num_threads()}"
    assert run_logits(device, [11])[0] is not None
    device.close()


def test_a_compiler_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match="false ended with 1"):
        build(tmp_path)


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: pathlib.Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(BuildError, match="can be written to by others"):
        build(tmp_path)


@pytest.mark.parametrize("compiler", ["false", "/no/such/directory/c++"])
def test_a_compiler_that_is_broken_leaves_everything_to_pytorch(
    monkeypatch: pytest.MonkeyPatch, llama: pathlib.Path, tmp_path: pathlib.Path, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(kernels, "find_missing_features", list)
    device = build_device(llama, dtype="bfloat16", kernels_directory=tmp_path)
    assert device.kernels.startswith("PyTorch, for the kernels cannot be built: ")
    assert compiler in device.kernels
    assert run_logits(device, [11])[0] is not None
    device.close()


def test_a_directory_that_cannot_be_made_leaves_everything_to_pytorch(
    monkeypatch: pytest.MonkeyPatch, llama: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(kernels, "find_missing_features", list)
    file = tmp_path / "file"
    file.touch()
    device = build_device(llama, dtype="bfloat16", kernels_directory=file / "kernels")
    assert device.kernels.startswith("PyTorch, for the kernels cannot be built: ")
    assert str(file) in device.kernels
    device.close()


@needs_kernels
def test_kernels_are_compiled_once(tmp_path: pathlib.Path) -> None:
    path, was_built = build(tmp_path / "kernels")
    assert was_built
    assert build(tmp_path / "kernels") == (path, False)
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_float32_and_a_setting_leave_everything_to_pytorch(llama: pathlib.Path) -> None:
    device = build_device(llama)
    assert device.kernels.startswith("PyTorch, for the dtype is float32; threads: ")
    device.close()
    device = build_device(llama, dtype="bfloat16", use_kernels=False, num_threads=3)
    assert device.kernels == "PyTorch, as the settings say; threads: 3"
    device.close()
