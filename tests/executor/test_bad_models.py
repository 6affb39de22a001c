"""Model directories that cannot be served: each is refused with one sentence that says what is wrong with it."""

from __future__ import annotations

import asyncio
import json
import pathlib
import shutil
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from executor_svc.models import load_model
from holdback.errors import ConfigError
from tests.executor.tiny_models import save_model


@pytest.fixture(scope="module")
def pristine_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def pristine_shards(pristine_model: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(pristine_model)
    directory = tmp_path_factory.mktemp("models") / "sharded"
    model.save_pretrained(directory, max_shard_size="20KB")
    return directory


@pytest.fixture
def model(pristine_model: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy to break."""
    return pathlib.Path(shutil.copytree(pristine_model, tmp_path / "tiny"))


@pytest.fixture
def sharded(pristine_shards: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy in several shards, to break."""
    return pathlib.Path(shutil.copytree(pristine_shards, tmp_path / "sharded"))


def edit_config(directory: pathlib.Path, **changes: Any) -> None:
    edit_json(directory / "config.json", **changes)


def edit_json(path: pathlib.Path, **changes: Any) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def assert_refused(directory: pathlib.Path, message: str, dtype: str = "float32") -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_model(directory, dtype)
    assert str(directory) in error.value.message
    assert "\n" not in error.value.message
    assert len(error.value.message) < 600


# Configurations


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "has a config.json that is not JSON"),
        ("[1]", "has a config.json of 3 bytes that is none"),
        ("{}", "config.json without model_type"),
        ("[" * 100_000, "has a config.json that is not JSON"),
        (None, "has no config.json that can be read: No such file"),
    ],
    ids=["cut", "list", "empty", "deep", "missing"],
)
def test_a_config_that_is_no_json_object_is_refused(model: pathlib.Path, content: str | None, message: str) -> None:
    (model / "config.json").unlink() if content is None else (model / "config.json").write_text(content)
    assert_refused(model, message)


def test_a_path_that_is_no_directory_is_refused(tmp_path: pathlib.Path) -> None:
    assert_refused(tmp_path / "nothing", "is no directory; allowed: one with config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": None}, "config.json without architectures"),
        ({"architectures": "LlamaForCausalLM"}, "whose architectures is 'LlamaForCausalLM'; allowed: names of models"),
        ({"architectures": [7]}, "whose architectures is .7.; allowed: names of models"),
        ({"architectures": ["MistralForCausalLM"]}, "'MistralForCausalLM'. but model_type 'llama', which is LlamaFor"),
        ({"model_type": None}, "config.json without model_type"),
        ({"model_type": 7}, "whose model_type is 7; allowed: names of models"),
        ({"model_type": "mistral"}, "'LlamaForCausalLM'. but model_type 'mistral', which is MistralForCausalLM"),
        ({"model_type": "clip"}, "model_type 'clip', of which transformers has no model that generates text"),
        ({"model_type": "nothing"}, "is of model_type 'nothing', which transformers does not know$"),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "quantized weights .*quant_method 'awq'.; allowed: float",
        ),
        ({"is_encoder_decoder": True}, "has an encoder beside its decoder; allowed: decoder-only models"),
        (
            {"transformers_weights": "other.safetensors"},
            "names its weights by transformers_weights; allowed: model.saf",
        ),
    ],
)
def test_a_config_of_another_kind_of_model_is_refused(
    model: pathlib.Path, changes: dict[str, Any], message: str
) -> None:
    edit_config(model, **changes)
    assert_refused(model, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, r"whose num_hidden_layers is 0; allowed: \[1, 1024\]"),
        ({"num_hidden_layers": 10**9}, r"whose num_hidden_layers is 1000000000; allowed: \[1, 1024\]"),
        ({"num_attention_heads": 0}, r"whose num_attention_heads is 0; allowed: \[1, 4096\]"),
        ({"hidden_size": -32}, r"whose hidden_size is -32; allowed: \[1, 1048576\]"),
        ({"hidden_size": "32"}, r"whose hidden_size is '32'; allowed: \[1, 1048576\]"),
        ({"vocab_size": 128.5}, r"whose vocab_size is 128.5; allowed: \[1, 16777216\]"),
        ({"vocab_size": True}, r"whose vocab_size is True; allowed: \[1, 16777216\]"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads is 4; allowed: a multiple of num_key_value_heads, which is 3",
        ),
        ({"hidden_size": 30, "head_dim": None}, "transformers can load|has the weight .* of shape"),
        ({"rms_norm_eps": float("nan")}, r"whose rms_norm_eps is nan; allowed: \[0, 1\]"),
        ({"rms_norm_eps": -1e-5}, r"whose rms_norm_eps is -1e-05; allowed: \[0, 1\]"),
        ({"rope_theta": -10000.0}, "whose rope_theta is -10000.0; allowed: a finite number above 0"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
            "whose rope_theta is inf; allowed: a finite number above 0",
        ),
        ({"intermediate_size": -1}, "holds nothing that transformers can load: RuntimeError: .*negative dimension"),
        ({"intermediate_size": "many"}, "holds nothing that transformers can load: "),
        ({"rms_norm_eps": "small"}, "holds nothing that transformers can load: "),
        ({"hidden_act": "no such thing"}, "holds nothing that transformers can load: "),
        ({"rope_parameters": {"rope_type": "none of them"}}, "holds nothing that transformers can load: "),
        ({"rope_parameters": [1]}, "holds nothing that transformers can load: "),
        ({"layer_types": ["full_attention"]}, "holds nothing that transformers can load: "),
        ({"eos_token_id": "</s>"}, "holds nothing that transformers can load: "),
    ],
)
def test_a_value_that_no_model_can_have_is_refused(model: pathlib.Path, changes: dict[str, Any], message: str) -> None:
    edit_config(model, **changes)
    assert_refused(model, message)


@pytest.mark.parametrize("eos", [128, -1, "</s>", True])
def test_an_eos_id_outside_the_vocabulary_is_refused(model: pathlib.Path, eos: object) -> None:
    edit_json(model / "generation_config.json", eos_token_id=eos)
    with pytest.raises(ConfigError, match=rf"eos_token_id is {eos}; allowed: \[0, 128\)"):
        load_model(model, "float32")


# Code


def test_code_in_a_model_directory_is_never_run(model: pathlib.Path) -> None:
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (model / "own.py").write_text("raise SystemExit('ran')")
    edit_config(model, auto_map=auto_map)
    load_model(model, "float32")  # transformers has a model of that type itself
    edit_config(model, model_type="their_own")
    assert_refused(model, "is of model_type 'their_own', .* not know; its own code .auto_map. is never run")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_and_not_read(model: pathlib.Path, name: str) -> None:
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert_refused(model, f"has its weights in {name}, and unpickling may run code; allowed: model.safetensors")


# Weights


def rewrite(directory: pathlib.Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, directory / "model.safetensors")


def write_shard(path: pathlib.Path, header: object, data: bytes = b"", header_bytes: int | None = None) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data)


def test_a_directory_without_weights_is_refused(model: pathlib.Path) -> None:
    (model / "model.safetensors").unlink()
    assert_refused(model, "no weights in model.safetensors or by .*index.json; other forms are not read")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_weights_that_are_cut_off_are_refused(model: pathlib.Path, share: float) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert_refused(model, "has a shard model.safetensors that is cut off or no safetensors file")


@pytest.mark.parametrize(
    ("header", "data", "header_bytes"),
    [
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}, bytes(8), None),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4), None),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(12), None),
        ({"w": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}}, bytes(8), None),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, bytes(8), None),
        ({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, bytes(8), None),
        ({"w": {"dtype": "X1", "shape": [2], "data_offsets": [0, 8]}}, bytes(8), None),
        ([1, 2], bytes(8), None),
        ({}, b"", 2**63),
        ({}, b"", 10**9),
    ],
)
def test_a_header_that_lies_is_refused(
    model: pathlib.Path, header: object, data: bytes, header_bytes: int | None
) -> None:
    write_shard(model / "model.safetensors", header, data, header_bytes)
    assert_refused(model, "has a shard model.safetensors that is cut off or no safetensors file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "has weights with missing keys: model.norm.weight"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.zeros(7)}),
            r"has the weight model.norm.weight of shape \[7\]; allowed: \[32\], as config.json says",
        ),
        (
            lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            "has weights with unexpected keys: model.layers.0.self_attn.q_proj.bias",
        ),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_refused(
    model: pathlib.Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    rewrite(model, change)
    assert_refused(model, message)


def test_a_checkpoint_of_more_layers_than_the_config_says_is_refused(model: pathlib.Path) -> None:
    edit_config(model, num_hidden_layers=1)
    assert_refused(model, "has weights with unexpected keys: model.layers.1.* and 6 more")


def test_weights_in_8_bits_are_refused(model: pathlib.Path) -> None:
    rewrite(
        model, lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"].to(torch.float8_e4m3fn)})
    )
    assert_refused(model, "has the weight lm_head.weight in F8_E4M3; allowed: F64, F32, F16, BF16")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool])
def test_weights_of_whole_numbers_are_refused(model: pathlib.Path, dtype: torch.dtype) -> None:
    """Their scales are not read, so they would run as other numbers than they stand for."""
    rewrite(model, lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"].to(dtype)}))
    assert_refused(model, "has the weight lm_head.weight in [A-Z0-9]+; allowed: F64, F32, F16, BF16")


def test_weights_in_64_bits_are_taken(model: pathlib.Path) -> None:
    rewrite(model, lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"].double()}))
    assert load_model(model, "float32").info.vocab_size == 128


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named(model: pathlib.Path, number: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(model, lambda weights: weights[name][5].index_fill_(0, torch.tensor(7), number))
    assert_refused(model, f"has the weight {name} with NaN or infinite numbers in torch.float32")


def test_a_weight_that_its_dtype_cannot_hold_is_named(model: pathlib.Path) -> None:
    rewrite(model, lambda weights: weights["model.norm.weight"].fill_(70_000.0))
    load_model(model, "bfloat16")
    assert_refused(model, "the weight model.norm.weight with NaN or infinite numbers in torch.float16", "float16")


# Shards


def shards(directory: pathlib.Path) -> list[pathlib.Path]:
    found = sorted(directory.glob("model-*.safetensors"))
    assert len(found) > 2
    return found


def test_a_missing_shard_is_named(sharded: pathlib.Path) -> None:
    missing = shards(sharded)[1]
    missing.unlink()
    assert_refused(sharded, f"lacks the shard {missing.name}, which its index names")


def test_a_shard_that_is_cut_off_is_named(sharded: pathlib.Path) -> None:
    cut = shards(sharded)[-1]
    cut.write_bytes(cut.read_bytes()[:-1])
    assert_refused(sharded, f"has a shard {cut.name} that is cut off")


def test_a_tensor_that_lies_in_another_shard_than_the_index_says_is_named(sharded: pathlib.Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    first, *_, last = shards(sharded)
    tensor = next(name for name, shard in index.items() if shard == first.name)
    edit_json(sharded / "model.safetensors.index.json", weight_map=index | {tensor: last.name})
    assert_refused(sharded, f"has an index that places {tensor} in the shard {last.name}, which lacks it")


def test_a_shard_that_the_index_does_not_name_leaves_its_weights_missing(sharded: pathlib.Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    forgotten = shards(sharded)[0].name
    kept = {tensor: shard for tensor, shard in index.items() if shard != forgotten}
    edit_json(sharded / "model.safetensors.index.json", weight_map=kept)
    assert_refused(sharded, "has weights with missing keys: ")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", 7])
def test_an_index_cannot_name_files_elsewhere(sharded: pathlib.Path, name: object) -> None:
    edit_json(sharded / "model.safetensors.index.json", weight_map={"lm_head.weight": name})
    assert_refused(sharded, f"has an index that names the shard {name!r}; allowed: a file name")


@pytest.mark.parametrize("weight_map", [{}, [1], None])
def test_an_index_that_names_nothing_is_refused(sharded: pathlib.Path, weight_map: object) -> None:
    edit_json(sharded / "model.safetensors.index.json", weight_map=weight_map)
    assert_refused(sharded, "index.json without a weight_map")


# Tokenizers


@pytest.mark.parametrize(
    "vocabulary", [{"a": 0, "b": 128}, [["piece", -1.0]] * 129], ids=["by-token", "in-the-order-of-ids"]
)
def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(model: pathlib.Path, vocabulary: object) -> None:
    (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert_refused(model, "tokenizer.json whose largest token id is 128; allowed: below .* vocab_size, which is 128")


@pytest.mark.parametrize("vocabulary", [{"a": 0, "b": 127}, [["piece", -1.0]] * 128, None, 7])
def test_a_tokenizer_that_fits_or_says_nothing_is_left_to_the_gateway(model: pathlib.Path, vocabulary: object) -> None:
    content = {"model": {"vocab": vocabulary}, "added_tokens": [{"id": 128, "content": "<image>"}]}
    (model / "tokenizer.json").write_text(json.dumps(content))
    load_model(model, "float32")


def test_a_broken_tokenizer_is_refused(model: pathlib.Path) -> None:
    (model / "tokenizer.json").write_text('{"model": ')
    assert_refused(model, "has a tokenizer.json that is not JSON")
    (model / "tokenizer.json").write_text("{}")
    assert_refused(model, "has a tokenizer.json without a model, so no tokenizer can be made of it")


# The command


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (
            lambda model: edit_config(model, num_attention_heads=0),
            "has a config.json whose num_attention_heads is 0; allowed: [1, 4096]",
        ),
        (
            lambda model: rewrite(model, lambda weights: weights["model.norm.weight"].fill_(float("nan"))),
            "has the weight model.norm.weight with NaN or infinite numbers in torch.bfloat16",
        ),
    ],
    ids=["config", "weights"],
)
@pytest.mark.loopback
async def test_the_executor_ends_with_2_and_one_sentence(
    model: pathlib.Path, breaks: Callable[[pathlib.Path], object], message: str
) -> None:
    breaks(model)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "holdback.cli", "executor", "--scheduler", "127.0.0.1:1", "--model", str(model)),
        *("--port", "0", "--health-port", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        _, errors = await child.communicate()
    assert child.returncode == 2, errors.decode()
    assert errors.decode().splitlines()[-1] == f"holdback executor: model directory {str(model)!r} {message}"
    assert b"Traceback" not in errors
