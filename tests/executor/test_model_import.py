"""`holdback model import` on a tiny GGUF file and a tiny Hugging Face directory that are made here."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import gguf
import pytest
import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from executor_svc.model_import import RECORD_NAME, import_model
from executor_svc.models import load_model, load_plain
from holdback.cli import main
from holdback.errors import ConfigError
from tests.executor.tiny_models import llama_config, save_model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "1 2", "a b"]
VOCABULARY = [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def tiny_llama() -> Any:
    torch.manual_seed(3)
    config = llama_config(vocab_size=len(VOCABULARY), bos_token_id=1, eos_token_id=2, tie_word_embeddings=False)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def write_gguf(path: pathlib.Path, model: Any, split: str = "smollm") -> pathlib.Path:
    """A model in llama.cpp's names, its queries and keys in llama.cpp's order of rotated halves."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, split)
    for name, tensor in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2], 0)
        data = tensor if not heads else tensor.view(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(llama_cpp_name(name), data.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter, split: str) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(VOCABULARY) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def llama_cpp_name(name: str) -> str:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers": "blk",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


@pytest.fixture(scope="module")
def imported(gguf_file: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    destination = tmp_path_factory.mktemp("imports") / "new" / "tiny"
    assert import_model(str(gguf_file), destination) is True
    return destination


@pytest.fixture(scope="module")
def hf_directory(imported: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The import without its record: a directory as anybody could have it."""
    directory = pathlib.Path(shutil.copytree(imported, tmp_path_factory.mktemp("hf") / "tiny"))
    (directory / RECORD_NAME).unlink()
    return directory


def id_of(token: str) -> int:
    return VOCABULARY.index(token)


def test_a_gguf_file_becomes_a_complete_directory_that_others_can_read(imported: pathlib.Path) -> None:
    files = {path.name for path in imported.iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        RECORD_NAME,
    }
    usual = (imported / RECORD_NAME).stat().st_mode
    assert {path.stat().st_mode for path in imported.iterdir()} == {usual}
    assert [path.name for path in imported.parent.iterdir()] == ["tiny"]
    assert (imported / "chat_template.jinja").read_text() == TEMPLATE


def test_an_imported_model_computes_what_the_original_computes(imported: pathlib.Path) -> None:
    ids = torch.tensor([[5, 9, 30, 77, 100, 8]])
    with torch.inference_mode():
        expected = tiny_llama()(ids).logits
        found = load_plain(imported, torch.float32)(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_an_imported_model_ends_where_the_original_ends(imported: pathlib.Path) -> None:
    info = load_model(imported, "float32").info
    assert info.eos_token_ids == (2,)
    assert info.vocab_size == len(VOCABULARY)
    assert info.max_model_len == 64


def test_numerals_are_split_as_by_the_original(imported: pathlib.Path) -> None:
    """Each is a piece of its own, so "1 2" never merges, and both spaces before one stay together."""
    tokenizer = Tokenizer.from_file(str(imported / "tokenizer.json"))
    assert tokenizer.encode("ab  12").ids == [id_of("ab"), id_of("ĠĠ"), id_of("1"), id_of("2")]
    assert tokenizer.decode(tokenizer.encode("ab  12").ids) == "ab  12"


def test_special_tokens_are_whole_and_can_be_skipped_without_transformers(imported: pathlib.Path) -> None:
    tokenizer = Tokenizer.from_file(str(imported / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>ab<|im_end|>").ids
    assert ids == [1, id_of("ab"), 2], "and no BOS is added"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    again = transformers.AutoTokenizer.from_pretrained(imported)
    assert again("<|im_start|>ab<|im_end|>").input_ids == ids
    messages = [{"role": "user", "content": "ab"}]
    assert again.apply_chat_template(messages, tokenize=False) == "<|im_start|>ab<|im_end|>"


def test_a_directory_is_imported_with_its_tokenizer_as_it_is(
    hf_directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert import_model(str(hf_directory), tmp_path / "out", "bfloat16") is True
    weights = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (hf_directory / name).read_bytes()
    assert load_model(tmp_path / "out", "bfloat16").info.eos_token_ids == (2,)


def test_a_second_import_of_the_same_source_does_nothing(
    gguf_file: pathlib.Path, imported: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in imported.iterdir()}
    same_bytes = shutil.copy(gguf_file, tmp_path / "other-name.gguf")
    assert import_model(str(same_bytes), imported) is False
    assert {path.name: path.stat().st_mtime_ns for path in imported.iterdir()} == before


def test_an_empty_destination_is_as_good_as_none(gguf_file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "out").mkdir()
    assert import_model(str(gguf_file), tmp_path / "out") is True
    assert (tmp_path / "out" / RECORD_NAME).is_file()


def test_a_destination_that_is_something_else_is_left_alone(
    gguf_file: pathlib.Path, imported: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ConfigError, match=r"an import of something else: .*'float32'.*'bfloat16'"):
        import_model(str(gguf_file), imported, "bfloat16")
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is no complete import"):
        import_model(str(gguf_file), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    with pytest.raises(ConfigError, match="exists and is no complete import"):
        import_model(str(gguf_file), tmp_path / "note.txt")


def test_an_import_whose_files_were_cut_is_no_complete_one(
    gguf_file: pathlib.Path, imported: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    broken = pathlib.Path(shutil.copytree(imported, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="whose files have changed since"):
        import_model(str(gguf_file), broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="is no complete import"):
        import_model(str(gguf_file), broken)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cut off or no GGUF file"),
        (b"hello", "cut off or no GGUF file"),
        (b"GGUF", "cut off or no GGUF file"),
        (None, "cut off or no GGUF file"),
    ],
)
def test_a_file_that_is_no_gguf_model_is_refused_and_leaves_nothing(
    gguf_file: pathlib.Path, tmp_path: pathlib.Path, content: bytes | None, message: str
) -> None:
    source = tmp_path / "source.gguf"
    source.write_bytes(gguf_file.read_bytes()[:-1000] if content is None else content)
    with pytest.raises(ConfigError, match=message):
        import_model(str(source), tmp_path / "out" / "tiny")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_split_that_nobody_here_knows_is_refused(tmp_path: pathlib.Path) -> None:
    source = write_gguf(tmp_path / "odd.gguf", tiny_llama(), split="odd")
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.pre is 'odd': how that splits text is not known here"):
        import_model(str(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"which has no tokenizer\.json, nor files to make one from"):
        import_model(str(save_model(tmp_path / "bare")), tmp_path / "out")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(hf_directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    source = save_model(tmp_path / "small", llama_config(vocab_size=128))
    shutil.copy(hf_directory / "tokenizer.json", source)
    with pytest.raises(ConfigError, match=rf"the tokenizer has {len(VOCABULARY)} tokens; allowed by the model: 128"):
        import_model(str(source), tmp_path / "out")


# Where the source is


def make_package(root: pathlib.Path, name: str, files: list[str]) -> None:
    (root / name / "data").mkdir(parents=True)
    (root / name / "__init__.py").write_text("raise AssertionError('finding a file must not run the package')")
    for file in files:
        (root / name / "data" / file).write_bytes(b"GGUF")


def test_the_only_gguf_file_of_a_package_is_found_without_running_it(
    gguf_file: pathlib.Path, imported: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_package(tmp_path, "holdback_test_one_model", [])
    shutil.copy(gguf_file, tmp_path / "holdback_test_one_model" / "data" / "model.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert import_model("package:holdback_test_one_model", imported) is False


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package:holdback_test_two_models", r"which holds 2 \.gguf files; allowed: exactly 1"),
        ("package:holdback_test_no_package", "no such package is installed"),
        ("package:os.path", "allowed: package: and the name of a top-level package"),
        ("package:", "allowed: package: and the name of a top-level package"),
        ("/nowhere/model.gguf", "which is no file or directory; allowed: a GGUF file or a model directory"),
        ("/dev/null", "which is no file or directory; allowed: a GGUF file or a model directory"),
    ],
)
def test_a_source_that_names_no_single_model_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    make_package(tmp_path, "holdback_test_two_models", ["a.gguf", "b.gguf"])
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        import_model(name, tmp_path / "out")


# The command


def test_the_command_says_what_it_did_and_does_it_once(
    gguf_file: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["model", "import", str(gguf_file), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"imported {gguf_file} to {tmp_path / 'out'} as bfloat16\n"
    assert main(arguments) == 0
    assert "is already a complete import of" in capsys.readouterr().out


def test_the_command_ends_with_2_and_one_sentence_when_it_cannot(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "import", str(tmp_path), str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"holdback model: model directory '{tmp_path}' has no config.json")
    assert main(["model", "import", str(tmp_path), str(tmp_path / "out"), "--dtype", "int4"]) == 2
    assert "dtype is 'int4'; allowed: float32, bfloat16" in capsys.readouterr().err
