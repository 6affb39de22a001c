"""Special tokens are added once, a directory that is none is named, a tokenizer that does not fit its model refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import re
import threading
import weakref
from collections.abc import AsyncIterator

import pytest
import transformers
from tokenizers import processors

from gateway.tokenizer import LANES, MAX_THREADS, Lane, Tokenizer, TokenizerThreads
from holdback.errors import ConfigError, ErrorReason, InvalidArgumentError, ResourceExhaustedError
from holdback.types import ModelInfo
from tests.gateway.small_tokenizers import KINDS, byte_ids, make_tokenizer, save_directory, with_bos


def model_info(**changes: object) -> ModelInfo:
    info = ModelInfo(fingerprint="f", name="toy", vocab_size=1000, eos_token_ids=(2,), max_model_len=64)
    return dataclasses.replace(info, **changes)  # type: ignore[arg-type]


@pytest.fixture
async def with_bos_tokenizer(tmp_path: pathlib.Path) -> AsyncIterator[Tokenizer]:
    tokenizer = Tokenizer.load(save_directory(tmp_path, with_bos(make_tokenizer("byte_level"))))
    yield tokenizer
    tokenizer.close()


@pytest.mark.case("B52")
async def test_bos_is_added_once_to_text_and_not_at_all_to_a_rendered_chat(with_bos_tokenizer: Tokenizer) -> None:
    hi = make_tokenizer("byte_level").encode("hi").ids
    assert await with_bos_tokenizer.encode("hi") == [1, *hi]
    assert await with_bos_tokenizer.encode_rendered("<s>hi") == [1, *hi]


@pytest.mark.case("B52")
async def test_a_text_that_begins_with_the_bos_string_gets_no_second_one(with_bos_tokenizer: Tokenizer) -> None:
    hi = make_tokenizer("byte_level").encode("hi").ids
    assert await with_bos_tokenizer.encode("<s>hi") == [1, *hi]
    assert await with_bos_tokenizer.encode("<s><s>hi") == [1, 1, *hi]


@pytest.mark.case("B50")
async def test_empty_text_has_the_tokens_that_the_model_adds_and_no_others(
    with_bos_tokenizer: Tokenizer, tmp_path: pathlib.Path
) -> None:
    assert await with_bos_tokenizer.encode("") == [1]
    plain = Tokenizer.load(save_directory(tmp_path / "plain", make_tokenizer("byte_level")))
    assert await plain.encode("") == []


async def test_tokens_at_the_end_are_added_once_too(tmp_path: pathlib.Path) -> None:
    backend = with_bos(make_tokenizer("byte_level"))
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer = Tokenizer.load(save_directory(tmp_path, backend))
    assert await tokenizer.encode("hi") == [1, *make_tokenizer("byte_level").encode("hi").ids, 2]


async def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: pathlib.Path) -> None:
    backend = with_bos(make_tokenizer("byte_level"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.load(save_directory(tmp_path, backend))
    text = "The quick brown fox"
    assert await tokenizer.encode(text) == [1, *make_tokenizer("byte_level").encode(text).ids]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
@pytest.mark.parametrize("template_adds_bos", [False, True])
async def test_ids_are_those_of_transformers(
    tmp_path: pathlib.Path, kind: str, flags: dict[str, bool], template_adds_bos: bool
) -> None:
    backend = with_bos(make_tokenizer(kind)) if template_adds_bos else make_tokenizer(kind)
    directory = save_directory(tmp_path, backend, tokenizer_class="PreTrainedTokenizerFast", **flags)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    ours = Tokenizer.load(directory)
    for text in ("Hello world", "", "  two spaces", "Ünïcödé \U0001f600", "a<|end|>b", "wörd with space"):
        assert await ours.encode(text) == theirs(text)["input_ids"], text


def test_eos_ids_are_gathered_from_all_files(tmp_path: pathlib.Path) -> None:
    directory = save_directory(tmp_path, make_tokenizer("byte_level"), eos_token={"content": "</s>"})
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 3}), encoding="utf-8")
    assert Tokenizer.load(directory).eos_token_ids == {2, 3, 4}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 392}, "largest token id is 392; allowed: below vocab_size of model 'toy', which is 392"),
        ({"eos_token_ids": (2, 700)}, "EOS id 700 of model 'toy' is no token"),
        (
            {"eos_token_ids": (3,)},
            r"EOS ids of model 'toy' are \[3\]; allowed: one of the tokenizer's, which are \[2\]",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_the_numbers(
    tmp_path: pathlib.Path, changes: dict[str, object], says: str
) -> None:
    tokenizer = Tokenizer.load(save_directory(tmp_path, make_tokenizer("byte_level")))
    assert re.search(says, tokenizer.mismatch(model_info(**changes)) or "")


def test_a_model_with_room_beyond_the_tokenizer_or_without_eos_fits(tmp_path: pathlib.Path) -> None:
    tokenizer = Tokenizer.load(save_directory(tmp_path, make_tokenizer("byte_level")))
    assert tokenizer.mismatch(model_info(vocab_size=395)) is None
    assert tokenizer.mismatch(model_info(eos_token_ids=())) is None


def test_added_tokens_may_lie_beyond_the_vocabulary_of_the_model(tmp_path: pathlib.Path) -> None:
    tokenizer = Tokenizer.load(save_directory(tmp_path, make_tokenizer("byte_level")))
    assert tokenizer.largest_token_id == 394
    assert tokenizer.mismatch(model_info(vocab_size=393)) is None


def test_a_directory_without_a_tokenizer_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*tokenizer\.json"):
        Tokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_file_that_is_not_what_its_name_says_is_named(tmp_path: pathlib.Path, name: str, content: bytes) -> None:
    directory = save_directory(tmp_path, make_tokenizer("byte_level"))
    (directory / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        Tokenizer.load(directory)


async def test_the_chat_template_of_its_own_file_wins_over_the_configuration(tmp_path: pathlib.Path) -> None:
    directory = save_directory(tmp_path, make_tokenizer("byte_level"), chat_template="from the configuration")
    assert Tokenizer.load(directory).chat_template == "from the configuration"
    (directory / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert Tokenizer.load(directory).chat_template == "from the file"


def test_of_several_named_templates_the_default_one_is_taken(tmp_path: pathlib.Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    directory = save_directory(tmp_path, make_tokenizer("byte_level"), chat_template=templates)
    assert Tokenizer.load(directory).chat_template == "plain"


async def test_a_long_text_does_not_hold_the_event_loop(tmp_path: pathlib.Path) -> None:
    tokenizer = Tokenizer.load(save_directory(tmp_path, make_tokenizer("byte_level")))
    encoding = asyncio.create_task(tokenizer.encode("\n" * 400_000))
    num_rounds = 0
    while not encoding.done():
        await asyncio.sleep(0)
        num_rounds += 1
    assert len(await encoding) == 400_000
    assert num_rounds > 100  # thousands; a handful where the loop waits for the interpreter's lock


@pytest.mark.parametrize(("size", "num_tokens"), [(65_000, 20_000), (100_000, 200_000)])
async def test_what_is_short_does_not_wait_for_long_texts_of_others(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, size: int, num_tokens: int
) -> None:
    tokenizer = Tokenizer.load(save_directory(tmp_path, make_tokenizer("byte_level")))
    may_go_on = threading.Event()

    def encode(text: str) -> list[int]:
        assert len(text) <= 4096 or may_go_on.wait(30)
        return [len(text)]

    monkeypatch.setattr(tokenizer, "_encode", encode)
    others = [asyncio.create_task(tokenizer.encode("x" * size)) for _ in range(2 * MAX_THREADS)]
    long_answer = asyncio.create_task(tokenizer.decode([5] * num_tokens))
    try:
        assert await asyncio.wait_for(tokenizer.encode("x" * 4096), 10) == [4096]
        assert await asyncio.wait_for(tokenizer.decode(byte_ids(make_tokenizer("byte_level"), b"hi")), 10) == "hi"
        assert not long_answer.done()
    finally:
        may_go_on.set()
    assert await asyncio.gather(*others) == [[size]] * len(others)
    await long_answer
    tokenizer.close()


async def test_a_text_waits_for_none_of_a_longer_kind(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = [Lane(limit, limit, 1000, 1) for limit in (4, 8, 12, 16)]
    monkeypatch.setattr("gateway.tokenizer.LANES", lanes)
    tokenizer = Tokenizer.load(save_directory(tmp_path, make_tokenizer("byte_level")))
    may_go_on = threading.Event()

    def encode(text: str) -> list[int]:
        assert len(text) < 16 or may_go_on.wait(30)
        return [len(text)]

    monkeypatch.setattr(tokenizer, "_encode", encode)
    long = asyncio.create_task(tokenizer.encode("x" * 16))
    try:
        for size in (12, 8, 4):
            assert await asyncio.wait_for(tokenizer.encode("x" * size), 10) == [size]
        assert not long.done()
    finally:
        may_go_on.set()
    assert await long == [16]
    tokenizer.close()


def test_only_short_texts_are_tokenized_several_at_a_time() -> None:
    # What one takes is up to 400 times its size.
    assert [lane.max_threads for lane in LANES if lane.max_text_chars > 65_536] == [1, 1]


async def test_of_the_longest_texts_one_is_under_way_though_they_are_for_several_models(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tokenizer.LANES", [dataclasses.replace(LANES[-1], max_text_chars=10)])
    threads = TokenizerThreads()
    directory = save_directory(tmp_path, make_tokenizer("byte_level"))
    tokenizers = [Tokenizer.load(directory, threads) for _ in range(2)]
    may_go_on = threading.Event()
    begun: list[str] = []

    def encode(text: str) -> list[int]:
        begun.append(text)
        assert may_go_on.wait(30)
        return []

    for tokenizer in tokenizers:
        monkeypatch.setattr(tokenizer, "_encode", encode)
    first, second = (asyncio.create_task(tokenizer.encode("x" * 10)) for tokenizer in tokenizers)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (queue,) = threads._queues
    assert (len(queue._turns.under_way), len(queue._turns._waiting)) == (1, 1)
    may_go_on.set()
    await asyncio.gather(first, second)
    assert len(begun) == 2
    threads.close()


async def test_more_tokens_than_any_request_may_have_are_refused_before_they_are_made_into_numbers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tokenizer.MAX_TOKEN_IDS", 10)
    tokenizer = Tokenizer.load(save_directory(tmp_path, make_tokenizer("byte_level")))
    assert len(await tokenizer.encode("\n" * 10)) == 10
    with pytest.raises(InvalidArgumentError, match="prompt has 11 tokens; allowed: at most 10") as caught:
        await tokenizer.encode("\n" * 11)
    assert caught.value.reason is ErrorReason.PROMPT_TOO_LONG
    tokenizer.close()


class FakeEncoding:
    """What a tokenizer makes, which can be watched."""

    ids = (5,) * 11

    def __len__(self) -> int:
        return len(self.ids)


class FakeBackend:
    """Makes one, and forgets it."""

    def __init__(self) -> None:
        self.made: weakref.ref[FakeEncoding] | None = None

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[FakeEncoding]:
        encoding = FakeEncoding()
        self.made = weakref.ref(encoding)
        return [encoding]


@pytest.mark.parametrize("most", [10, 11])
async def test_what_a_long_text_took_is_given_back_whether_it_is_refused_or_not(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    tokenizer = Tokenizer.load(save_directory(tmp_path, make_tokenizer("byte_level")))
    backend = FakeBackend()
    is_let_go_of: list[bool] = []
    monkeypatch.setattr("gateway.tokenizer.MAX_TOKEN_IDS", most)
    monkeypatch.setattr(tokenizer, "_backend", backend)
    monkeypatch.setattr(
        "gateway.tokenizer.give_back_memory",
        lambda: is_let_go_of.append(backend.made is not None and not backend.made()),
    )
    (outcome,) = await asyncio.gather(tokenizer.encode("x" * 65_537), return_exceptions=True)
    assert is_let_go_of == [True]
    assert isinstance(outcome, InvalidArgumentError) is (most == 10)
    assert backend.made is not None
    assert backend.made() is None  # though the error lives
    await asyncio.gather(tokenizer.encode("x" * 65_536), return_exceptions=True)
    assert is_let_go_of == [True]
    tokenizer.close()


@pytest.mark.parametrize("size", [4096, 65_000, 100_000])
async def test_the_shorter_of_two_goes_first_though_many_longer_ones_of_its_kind_came_before(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    tokenizer = Tokenizer.load(save_directory(tmp_path, make_tokenizer("byte_level")))
    may_go_on = threading.Event()
    begun: list[int] = []

    def encode(text: str) -> list[int]:
        begun.append(len(text))
        assert may_go_on.wait(30)
        return []

    monkeypatch.setattr(tokenizer, "_encode", encode)
    waiting = [asyncio.create_task(tokenizer.encode("x" * size)) for _ in range(50)]
    waiting.append(asyncio.create_task(tokenizer.encode("x" * (size - 1000))))
    await asyncio.sleep(0)
    may_go_on.set()
    await asyncio.gather(*waiting)
    assert begun == [size, size - 1000, *[size] * 49]
    tokenizer.close()


@pytest.mark.parametrize("size", [4000, 50_000, 100_000])
async def test_more_text_than_may_wait_is_refused_and_the_rest_is_served(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    held = [size + 256, 2 * size + 512]
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    limited = [dataclasses.replace(lane, max_chars=held[1] + 300) for lane in LANES]
    monkeypatch.setattr("gateway.tokenizer.LANES", limited)
    tokenizer = Tokenizer.load(save_directory(tmp_path, make_tokenizer("byte_level")))
    waiting = [asyncio.create_task(tokenizer.encode("\n" * size)) for _ in range(2)]
    await asyncio.sleep(0)
    expected = f"{held[1]} characters wait to be tokenized and {held[0]} would be added; allowed: {held[1] + 300}"
    with pytest.raises(ResourceExhaustedError, match=expected):
        await tokenizer.encode("\n" * size)
    with pytest.raises(ResourceExhaustedError, match="would be added"):
        await tokenizer.decode([5] * ({4000: 16, 50_000: 128, 100_000: 512}[size] * 1024))
    other = "\n" if size > 4096 else "\n" * 5000
    assert len(await tokenizer.encode(other)) == len(other)
    assert [len(token_ids) for token_ids in await asyncio.gather(*waiting)] == [size, size]
    tokenizer.close()


async def test_a_text_alone_may_have_more_than_may_wait(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tokenizer.LANES", [dataclasses.replace(lane, max_chars=1000) for lane in LANES])
    tokenizer = Tokenizer.load(save_directory(tmp_path, make_tokenizer("byte_level")))
    assert len(await tokenizer.encode("\n" * 300_000)) == 300_000
    tokenizer.close()
