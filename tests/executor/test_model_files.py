"""What is judged of a model directory before its weights are read: a length to serve, and what the files hold."""

from __future__ import annotations

import json
import pathlib

import pytest
import safetensors.torch
import torch
import transformers

from executor_svc.model_description import describe_model
from executor_svc.model_directory import list_weights
from executor_svc.models import load_model
from holdback.errors import ConfigError
from tests.executor.tiny_models import save_model


@pytest.mark.parametrize("kind", ["Bloom", "Mamba2"])
def test_a_model_without_a_length_of_its_own_is_refused_for_what_no_length_mends(
    tmp_path: pathlib.Path, kind: str
) -> None:
    config = getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForCausalLM"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is a model whose attention cannot be replaced by paged attention$"):
        load_model(tmp_path, "float32")
    assert describe_model(tmp_path, "float32", None) is None, "what transformers alone can tell is left to it"


def test_a_model_whose_length_is_not_known_asks_for_one(tmp_path: pathlib.Path) -> None:
    path = save_model(tmp_path / "tiny") / "config.json"
    content = json.loads(path.read_text())
    del content["max_position_embeddings"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="max_model_len is not set, and config"):
        load_model(path.parent, "float32")
    assert load_model(path.parent, "float32", max_model_len=32).info.max_model_len == 32


def test_masks_and_positions_of_old_files_are_no_weights(tmp_path: pathlib.Path) -> None:
    ones = torch.ones(1, 4, dtype=torch.uint8)
    names = ["h.0.attn.bias", "gpt_neox.layers.0.attention.bias", "embeddings.position_ids", "experts.down_proj_blocks"]
    safetensors.torch.save_file({name: ones.clone() for name in names}, tmp_path / "model.safetensors")
    assert list_weights(tmp_path) == [tmp_path / "model.safetensors"]
