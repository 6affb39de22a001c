"""Text that comes token by token is the text of the whole, whatever the vocabulary and wherever characters are cut."""

from __future__ import annotations

import functools
import pathlib
import time
import timeit

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.detokenizer import Detokenizer, StopStrings, TokenTable, decode
from holdback.errors import ConfigError
from tests.gateway.small_tokenizers import KINDS, byte_ids, make_tokenizer

EMOJI = "\U0001f600"
SYLLABLE = "\uac00"


@functools.cache
def table(kind: str) -> TokenTable:
    return TokenTable(make_tokenizer(kind))


@functools.cache
def shipped(directory: pathlib.Path) -> tuple[Tokenizer, TokenTable]:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return tokenizer, TokenTable(tokenizer)


def pieces_of(kind: str, prompt: list[int], output: list[int], *, keep_special_tokens: bool = False) -> list[str]:
    detokenizer = Detokenizer(table(kind), prompt, keep_special_tokens=keep_special_tokens)
    return [*map(detokenizer.add, output), detokenizer.flush()]


def added_text(tokenizer: Tokenizer, prompt: list[int], output: list[int], keep_special_tokens: bool) -> str:
    """The definition: decode(prompt + output) without the characters that decode(prompt) has whole."""
    skip = not keep_special_tokens
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    if whole == before and not tokenizer.decode(output, skip_special_tokens=skip):
        return ""  # nothing of the output is shown; a byte that leaves the same character incomplete is
    return whole[len(before) - ends_within_character(tokenizer, prompt, skip) :]


def ends_within_character(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> bool:
    """Whether some next byte joins the last character shown instead of being one more."""
    if tokenizer.decoder.__class__ is not decoders.ByteLevel:
        return False  # the other kinds are given whole characters only
    before = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    continuations = byte_ids(tokenizer, bytes(range(0x80, 0xC0)))
    texts = [tokenizer.decode([*ids, i], skip_special_tokens=skip_special_tokens) for i in continuations]
    return any(len(text) == len(before) for text in texts)


def token_lists(kind: str, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    tokenizer = make_tokenizer(kind)
    ids = st.integers(0, tokenizer.get_vocab_size() + 3)
    if kind == "byte_level":
        return st.lists(ids, max_size=max_size)
    # whole characters only: what a run with a wrong byte becomes is the next test's
    characters = st.characters(codec="utf-8", min_codepoint=0x80).map(lambda c: tuple(byte_ids(tokenizer, c.encode())))
    is_byte = {i for i in range(tokenizer.get_vocab_size()) if (tokenizer.id_to_token(i) or "").startswith("<0x")}
    single = ids.filter(lambda i: i not in is_byte).map(lambda i: (i,))
    parts = st.one_of(single, characters) if is_byte else single
    return st.lists(parts, max_size=max_size).map(lambda found: [i for part in found for i in part])


@pytest.mark.model
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_of_the_shipped_vocabulary_concatenate_too(model_directory: pathlib.Path, data: st.DataObject) -> None:
    tokenizer, tokens = shipped(model_directory)
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=24)
    prompt, output, keep = data.draw(ids), data.draw(ids), data.draw(st.booleans())
    detokenizer = Detokenizer(tokens, prompt, keep_special_tokens=keep)
    pieces = [*map(detokenizer.add, output), detokenizer.flush()]
    assert "".join(pieces) == added_text(tokenizer, prompt, output, keep)


@pytest.mark.case("B41")
def test_a_character_that_prompt_and_output_leave_incomplete_is_shown_once() -> None:
    prompt, output = byte_ids(make_tokenizer("byte_level"), b"\xe0"), byte_ids(make_tokenizer("byte_level"), b"\xa1")
    assert pieces_of("byte_level", prompt, output) == ["", "\ufffd"]
    assert added_text(make_tokenizer("byte_level"), prompt, output, False) == "\ufffd"


@pytest.mark.case("B44")
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_concatenate_to_what_the_output_adds_to_the_prompt(kind: str, data: st.DataObject) -> None:
    prompt, output = data.draw(token_lists(kind)), data.draw(token_lists(kind))
    keep = data.draw(st.booleans())
    expected = added_text(make_tokenizer(kind), prompt, output, keep)
    assert "".join(pieces_of(kind, prompt, output, keep_special_tokens=keep)) == expected


@pytest.mark.parametrize("kind", KINDS)
@example(token_ids=byte_ids(make_tokenizer("byte_level"), b"a\xed\xa0\x80b\xe0\xa1"), cut=3, keep=False)
@given(token_ids=st.lists(st.integers(0, 399), max_size=24), cut=st.integers(0, 24), keep=st.booleans())
def test_tokens_at_once_give_the_text_of_one_after_the_other(
    kind: str, token_ids: list[int], cut: int, keep: bool
) -> None:
    at_once = Detokenizer(table(kind), keep_special_tokens=keep)
    pieces = [at_once.add_all(token_ids[:cut]), at_once.add_all(token_ids[cut:]), at_once.flush()]
    assert "".join(pieces) == "".join(pieces_of(kind, [], token_ids, keep_special_tokens=keep))


@pytest.mark.case("B41")
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_half_a_surrogate_pair_in_the_prompt_is_not_shown_again(kind: str) -> None:
    prompt, output = byte_ids(make_tokenizer(kind), b"a\xed\xa0"), byte_ids(make_tokenizer(kind), b"\xbfb")
    assert decode(table(kind), prompt) == "a\ufffd\ufffd"
    assert "".join(pieces_of(kind, prompt, output)) == "\ufffdb"


@pytest.mark.case("B41")
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@example(data=b"\x00\xed\xa0\x00", cut=3)
@given(data=st.binary(max_size=12), cut=st.integers(0, 12))
def test_any_bytes_give_the_text_that_utf8_says_wherever_the_prompt_ends(kind: str, data: bytes, cut: int) -> None:
    hello = make_tokenizer(kind).encode("Hello").ids
    ids = [*hello, *byte_ids(make_tokenizer(kind), data)]
    cut = min(cut, len(data)) + len(hello)
    whole = (b"Hello" + data).decode("utf-8", "replace")
    assert decode(table(kind), ids) == whole
    text = "".join(pieces_of(kind, ids[:cut], ids[cut:]))
    if cut == len(ids):
        assert text == ""
        return
    assert whole.endswith(text)
    # what is missing in front is what the prompt has whole: its text without one character that may be incomplete
    before = (b"Hello" + data[: cut - len(hello)]).decode("utf-8", "replace")
    assert len(whole) - len(text) in (len(before), len(before) - 1)


@given(token_lists("byte_level"), token_lists("byte_level"))
def test_a_piece_never_shows_a_character_that_a_later_token_completes(prompt: list[int], output: list[int]) -> None:
    detokenizer = Detokenizer(table("byte_level"), prompt)
    shown = ""
    whole = added_text(make_tokenizer("byte_level"), prompt, output, keep_special_tokens=False)
    for token_id in output:
        shown += detokenizer.add(token_id)
        assert whole.startswith(shown)


@pytest.mark.case("B41")
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_characters_split_over_tokens_come_whole(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.encode("Hello").ids
    output = byte_ids(tokenizer, f" Hi {EMOJI}{SYLLABLE}!".encode())
    pieces = pieces_of(kind, prompt, output)
    assert pieces == [" ", "H", "i", " ", "", "", "", EMOJI, "", "", SYLLABLE, "!", ""]


@pytest.mark.case("B41")
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_truncated_character_is_one_replacement_character_at_the_end(kind: str) -> None:
    output = byte_ids(make_tokenizer(kind), b"Hi \xf0\x9f\x98")
    assert pieces_of(kind, [], output) == ["H", "i", " ", "", "", "", "\ufffd"]


@pytest.mark.case("B41")
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_byte_that_is_no_character_holds_nothing_back(kind: str) -> None:
    output = byte_ids(make_tokenizer(kind), b"\xffok")
    assert pieces_of(kind, [], output) == ["\ufffd", "o", "k", ""]


@pytest.mark.case("B43")
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_prompt_that_ends_within_a_character_does_not_leak(kind: str) -> None:
    tokenizer = make_tokenizer(kind)
    prompt = byte_ids(tokenizer, b"abc \xf0\x9f")
    assert pieces_of(kind, prompt, byte_ids(tokenizer, b"\x98\x80!")) == ["", EMOJI, "!", ""]


@pytest.mark.case("B43")
def test_a_character_that_the_output_does_not_complete_is_shown_with_it_and_not_without_output() -> None:
    prompt = byte_ids(make_tokenizer("byte_level"), b"abc \xf0\x9f")
    assert pieces_of("byte_level", prompt, byte_ids(make_tokenizer("byte_level"), b"!")) == ["\ufffd!", ""]
    assert pieces_of("byte_level", prompt, []) == [""]


@pytest.mark.case("B44")
def test_spaces_are_kept_and_the_first_of_a_text_is_dropped_once() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁Hello": 0, "▁world": 1, "▁": 2, "▁x": 3, "▁and": 4}, merges=[]))
    tokenizer.add_special_tokens(["<sep>"])
    for decoder in (
        decoders.Metaspace(prepend_scheme="always"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    ):
        tokenizer.decoder = decoder
        own = TokenTable(tokenizer)
        assert decode(own, [0, 1, 2, 3]) == "Hello world  x"
        assert decode(own, [0, 5, 1]) == "Hello world"
        assert decode(own, [0, 5, 1], keep_special_tokens=True) == "Hello<sep> world"
        assert Detokenizer(own, [0]).add(4) == " and"
        assert Detokenizer(own, []).add(4) == "and"
        assert Detokenizer(own, [5]).add(4) == "and"


def test_ids_that_the_vocabulary_does_not_have_add_nothing() -> None:
    hello = make_tokenizer("byte_level").encode("Hello").ids
    assert pieces_of("byte_level", [10_000], [*hello, 10_001]) == [*pieces_of("byte_level", [], hello)[:-1], "", ""]


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.CTC(), "CTC"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), "ByteLevel"),
        (decoders.Strip(" ", 1, 1), "Strip"),
    ],
)
def test_a_decoder_whose_text_changes_with_later_tokens_is_refused(decoder: decoders.Decoder, named: str) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoder
    with pytest.raises(ConfigError, match=named):
        TokenTable(tokenizer)


def run_stop(stop: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What is given out for each piece, the rest last, and the stop string that matched."""
    search = StopStrings(stop)
    given_out = []
    for piece in pieces:
        text, matched = search.add(piece)
        given_out.append(text)
        if matched is not None:
            return given_out, matched
    return [*given_out, search.flush()], None


@pytest.mark.case("B38")
def test_a_stop_string_over_several_tokens_is_cut_out_and_nothing_of_it_is_shown_before() -> None:
    given_out, matched = run_stop(["fox run"], ["red", " fo", "x ru", "ns", " far"])
    assert (given_out, matched) == (["red", " ", "", ""], "fox run")


@pytest.mark.case("B38")
def test_withheld_text_is_given_out_when_the_text_ends_or_goes_on_otherwise() -> None:
    assert run_stop(["fox run"], ["red", " fo", "g"]) == (["red", " ", "fog", ""], None)
    assert run_stop(["</end>"], ["a <", "/e"]) == (["a ", "", "</e"], None)


@pytest.mark.case("B40")
def test_no_stop_strings_withhold_nothing_and_a_space_is_one_like_any_other() -> None:
    assert run_stop([], ["a", " b"]) == (["a", " b", ""], None)
    assert run_stop([" "], ["a", "b c"]) == (["a", "b"], " ")


def test_the_match_that_ends_first_counts_and_of_those_the_longest() -> None:
    assert run_stop(["abcd", "bc"], ["xabcd"]) == (["xa"], "bc")
    assert run_stop(["c", "abc"], ["xab", "c"]) == (["x", ""], "abc")


def test_a_match_may_begin_within_a_failed_one() -> None:
    assert run_stop(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


@given(
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab<", max_size=5), max_size=8),
)
def test_the_outcome_does_not_depend_on_how_the_text_is_cut(stop: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    found = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    end, negative_length, expected = min(found, default=(len(text), 0, None))
    given_out, matched = run_stop(stop, pieces)
    assert "".join(given_out) == text[: end + negative_length]
    assert matched == expected


@given(st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3), st.text("ab<", max_size=12))
def test_no_more_is_withheld_than_could_become_a_stop_string(stop: list[str], text: str) -> None:
    search = StopStrings(stop)
    shown = ""
    for index, character in enumerate(text):
        given_out, matched = search.add(character)
        shown += given_out
        if matched is not None:
            return
        so_far = text[: index + 1]
        could_begin = [n for s in stop for n in range(len(s)) if so_far.endswith(s[:n])]
        assert len(so_far) - len(shown) == max(could_begin)


def test_long_stop_strings_cost_what_short_ones_do_before_any_of_them_begins() -> None:
    """Each choice of a request has its own, on the loop that serves all others."""

    def fastest_s(strings: list[str]) -> float:
        return min(timeit.repeat(lambda: StopStrings(strings).add("xyz"), number=50, repeat=5, timer=time.process_time))

    letters = [chr(98 + index) for index in range(16)]
    assert fastest_s(["a" * 1023 + letter for letter in letters]) < 20 * fastest_s(letters)  # 500 times as many


def test_a_long_stop_string_that_nearly_comes_again_and_again_is_found() -> None:
    stop = StopStrings(["ab" * 500 + "c"])
    text = ("ab" * 499 + "x") * 2 + "ab" * 700 + "c and more"
    outcome = "".join(piece for piece, _ in [stop.add(character) for character in text[:-9]])
    assert outcome == ("ab" * 499 + "x") * 2 + "ab" * 200
