"""Where weights and tokenizers come from, and that gateways see no weights."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest
import yaml

from gateway.vllm_engine.tokenizer_files import FILE_NAMES
from tests.chart.rendering import CHART, EXAMPLES, ROOT, SMALL, Manifest, Rendered, refusal, render

DEFAULT_CLAIM = "\npoolDefaults: {model: {persistentVolumeClaim: {claimName: shared, path: all}}}\n"


def mounts_of(container: Manifest) -> dict[str, str | None]:
    """Folders of a container, with the folder of the volume."""
    return {one["mountPath"]: one.get("subPath") for one in container["volumeMounts"]}


def copier(rendered: Rendered) -> Manifest:
    """The container that copies the only tokenizer."""
    (container,) = rendered.pod("Deployment", "gateway")["initContainers"]
    assert isinstance(container, dict)
    return container


def claims(rendered: Rendered, deployment: str) -> set[str]:
    volumes = rendered.pod("Deployment", deployment)["volumes"]
    return {one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one}


def test_weights_come_from_a_claim_or_from_the_image(everything, small):
    (mount,) = [one for one in small.container("Deployment", "cpu")["volumeMounts"] if one["name"] == "model"]
    assert mount == {"name": "model", "mountPath": "/models/small", "subPath": "small", "readOnly": True}
    assert small.config("executor")["model"] == "/models/small"
    assert everything.config("executor", "split")["model"] == "/models/tiny"
    assert claims(everything, "split") == set()
    assert "model" not in everything.config("executor", "sim-sim")


def test_a_pool_takes_its_model_from_elsewhere_than_the_defaults_say():
    pool = SMALL.replace("{persistentVolumeClaim: {claimName: models, path: small}}", "{imagePath: /own}")
    image = render(pool + DEFAULT_CLAIM)
    assert image.config("executor")["model"] == "/own"
    assert image.config("gateway")["pools"][0]["tokenizer"] == "/own"
    assert claims(image, "cpu") == claims(image, "gateway") == set()
    claim = render(SMALL + "\npoolDefaults: {model: {imagePath: /all}}\n")
    assert claim.config("executor")["model"] == "/models/small"
    assert claims(claim, "cpu") == {"models"}


def test_a_pool_that_does_not_say_where_its_model_is_has_that_of_the_defaults():
    pool = SMALL.replace("model: {persistentVolumeClaim: {claimName: models, path: small}}", "")
    rendered = render(pool + DEFAULT_CLAIM)
    assert claims(rendered, "cpu") == claims(rendered, "gateway") == {"shared"}
    assert mounts_of(rendered.container("Deployment", "cpu"))["/models/small"] == "all"
    assert copier(rendered)["volumeMounts"][1]["subPath"] == "all"


def test_a_pool_takes_its_tokenizer_from_elsewhere_than_the_defaults_say():
    defaults = "\npoolDefaults: {tokenizer: {configMap: shared}}\n"
    rendered = render(SMALL.replace("executors:", "tokenizer: {imagePath: /own}\n    executors:") + defaults)
    assert rendered.config("gateway")["pools"][0]["tokenizer"] == "/own"
    assert "initContainers" not in rendered.pod("Deployment", "gateway")
    other = render(SMALL + defaults)
    (volume,) = [one for one in other.pod("Deployment", "gateway")["volumes"] if one["name"] == "tokenizer-small"]
    assert volume["configMap"] == {"name": "shared"}


def test_defaults_that_name_two_kinds_are_refused_for_a_pool_that_names_none():
    pool = SMALL.replace("model: {persistentVolumeClaim: {claimName: models, path: small}}", "")
    words = refusal(pool + DEFAULT_CLAIM, sets=["poolDefaults.model.imagePath=/m"])
    assert "pools[small].model has imagePath and persistentVolumeClaim; allowed: one of them" in words


def test_a_gateway_has_tokenizers_and_no_weights(everything, small):
    own = mounts_of(small.container("Deployment", "gateway"))
    assert "/tokenizers/small" in own
    assert not any(path.startswith("/models") for path in own)
    folders = mounts_of(everything.container("Deployment", "gateway"))
    assert folders["/tokenizers/large"] == "large"
    assert folders["/tokenizers/sim"] is None
    pools = {pool["served_model_names"][0]: pool["tokenizer"] for pool in everything.config("gateway")["pools"]}
    assert pools == {"large": "/tokenizers/large", "tiny": "/models/tiny", "sim": "/tokenizers/sim"}
    assert "initContainers" not in everything.pod("Deployment", "gateway")


def copy(container: Manifest, model: pathlib.Path, tokenizer: pathlib.Path) -> str:
    """Runs the rendered command with folders of this machine. Returns what it says."""
    command = [
        part.replace("/models/small", str(model)).replace("/tokenizers/small", str(tokenizer))
        for part in container["command"]
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout


def test_files_that_a_model_does_not_have_are_left_out_of_its_tokenizer(small, tmp_path):
    """Such as the chat template of a model that does not chat."""
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    model.mkdir()
    tokenizer.mkdir()
    (model / "blob").write_text("{}", encoding="utf-8")
    (model / "tokenizer.json").symlink_to(model / "blob")
    (model / "config.json").write_text("1", encoding="utf-8")
    (model / "config.json").chmod(0o400)
    (model / "model.safetensors").write_text("weights", encoding="utf-8")
    said = copy(copier(small), model, tokenizer)
    assert {path.name for path in tokenizer.iterdir()} == {"tokenizer.json", "config.json"}
    assert not (tokenizer / "tokenizer.json").is_symlink()
    assert "chat_template.jinja is not there" in said
    (model / "config.json").chmod(0o600)
    (model / "config.json").write_text("2", encoding="utf-8")
    copy(copier(small), model, tokenizer)  # as after a restart of the node
    assert (tokenizer / "config.json").read_text(encoding="utf-8") == "2"


def test_what_is_copied_is_all_that_gateways_read_or_hand_out(small):
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert sorted(values["poolDefaults"]["tokenizer"]["files"]) == sorted(FILE_NAMES)
    assert copier(small)["command"][4:] == values["poolDefaults"]["tokenizer"]["files"]
    own = render(SMALL, sets=["poolDefaults.tokenizer.files={tokenizer.json}"])
    assert copier(own)["command"][4:] == ["tokenizer.json"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_gateways_of_an_example_find_the_chat_template(example):
    """`holdback model import` writes it as a file of its own, and without it a model cannot chat."""
    container = copier(render(files=[example]))
    assert {"tokenizer.json", "chat_template.jinja"} <= set(container["command"])


def test_the_storage_class_in_the_docs_has_the_user_of_the_pods_and_nobody_else(small):
    """Executors refuse a compile cache of another's."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (block,) = [one for one in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "StorageClass" in one]
    parameters = yaml.safe_load(block)["parameters"]
    context = small.pod("Deployment", "cpu")["securityContext"]
    assert (parameters["uid"], parameters["gid"]) == (str(context["runAsUser"]), str(context["runAsGroup"]))
    assert parameters["directoryPerms"] == "700"
