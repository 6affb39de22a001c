"""Bodies of HTTP requests: what is no JSON that means one thing only is refused, soon and in little memory."""

from __future__ import annotations

import contextlib
import json
import time

import pytest

from gateway.limits import MAX_PROMPT_BYTES, MAX_TOKEN_IDS
from gateway.openai.body import (
    LARGEST_BODY_BYTES,
    MAX_BODY_BYTES,
    MAX_JSON_COMMAS,
    MAX_JSON_CONTAINERS,
    MAX_JSON_DEPTH,
    MAX_JSON_DIGITS,
    MAX_JSON_FRACTIONS,
    MAX_JSON_STRINGS,
    BodyLimits,
    decode_object,
)
from gateway.openai.completion import CompletionRequest
from gateway.openai.errors import BodyError
from holdback.errors import InvalidArgumentError


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"a": [1, 2.5, "x", None, True, {"b": [[]]}]},
        {"text": 'quotes " and \\ brackets [[[[{{{{ and commas ,,,, in text'},
        {"text": "\U0001f600 한 \u0000"},
        {"big": 2**70, "small": 1e-300},
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_is_decoded_as_json(document: dict[str, object], ascii_only: bool) -> None:
    assert decode_object(json.dumps(document, ensure_ascii=ascii_only).encode()) == document


def test_depth_and_width_are_counted_outside_of_strings() -> None:
    text = "[" * 100 + '\\"' + "{" * 100
    assert decode_object(b'{"a": "%s"}' % text.encode())["a"] == text.replace("\\", "")


def test_the_deepest_document_is_decoded_and_one_deeper_is_refused() -> None:
    inner = MAX_JSON_DEPTH - 1
    decode_object(b'{"a":' + b"[" * inner + b"]" * inner + b"}")
    with pytest.raises(BodyError, match=f"{MAX_JSON_DEPTH + 1} levels; allowed: at most {MAX_JSON_DEPTH}"):
        decode_object(b'{"a":[' + b"[" * inner + b"]" * inner + b"]}")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[]", "an object is needed"),
        (b"null", "an object is needed"),
        (b'"x', "Unterminated string"),
        (b'{"a":1}x', "Extra data"),
        (b'{"a":1,"a":2}', "the key 'a' stands twice"),
        (b'{"x":{"a":1,"b":0,"a":1}}', "the key 'a' stands twice"),
        (b'{"a":NaN}', "NaN is no number"),
        (b'{"a":-Infinity}', "-Infinity is no number"),
        (b'{"a":' + b"9" * 41 + b"}", "more than 40 digits"),
        (b'{"a":"\\ud83d"}', "half of a surrogate pair"),
        (b'{"\\udc00":1}', "half of a surrogate pair"),
        (b'{"a":"\xff"}', "byte 6 is not UTF-8"),
        (b'{"a":"\xed\xa0\x80"}', "is not UTF-8"),
        (b'\xef\xbb\xbf{"a":1}', "BOM"),
        ('{"a":1}'.encode("utf-16"), "byte 0 is not UTF-8"),
        (b'{"a":1e', "Expecting"),
    ],
)
def test_what_is_not_such_json_is_refused_in_words(body: bytes, words: str) -> None:
    with pytest.raises(BodyError, match=words) as caught:
        decode_object(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert len(caught.value.message) < 300


@pytest.mark.case("B70")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[" * 100_000, "arrays and objects"),
        (b'{"a":' * 20_000, "levels"),
        (b'{"a":[' + b"[]," * 100_000 + b"[]]}", f"at most {MAX_JSON_CONTAINERS}"),
        (b'{"a":[' + b"0.5," * 200_000 + b"0]}", "200000 fractions"),
        (b'{"a":[' + b"1e5," * 200_000 + b"0]}", "200000 fractions"),
        (b'{"a":[' + b"0," * 4_000_000 + b"0]}", "commas"),
        (b'{"a":[' + b'"",' * 400_000 + b'""]}', f"more than {MAX_JSON_STRINGS} strings"),
        (b'{"' + b'\\"' * 2_000_000, "Unterminated string"),
        (b'"' * 4_000_000, "strings"),
        (b'{"a":"' + b"\\" * 4_000_001, "Unterminated|Invalid"),
    ],
    ids=[
        "deep-arrays",
        "deep-objects",
        "wide",
        "fractions",
        "exponents",
        "long",
        "strings",
        "escapes",
        "quotes",
        "backslashes",
    ],
)
def test_a_body_that_asks_for_much_work_gets_little(body: bytes, words: str) -> None:
    began = time.process_time()
    with pytest.raises(BodyError, match=words):
        decode_object(body)
    assert time.process_time() - began < 0.5  # some 0.03 s; quadratic work would be minutes


def repeated(before: bytes, unit: bytes, after: bytes, limit: int = MAX_BODY_BYTES) -> bytes:
    """As many units as a body of the usual size has room for."""
    return before + unit * min(limit, (MAX_BODY_BYTES - len(before) - len(after)) // len(unit)) + after


@pytest.mark.parametrize(
    "body",
    [
        repeated(b'{"prompt":[1', b",1", b"]}", MAX_JSON_COMMAS),
        repeated(b'{"prompt":[1', b",0.1234567", b"]}", MAX_JSON_FRACTIONS),
        repeated(b'{"prompt":"x","output_token_ids":[1', b",-1", b"]}", MAX_JSON_COMMAS - 1),
        repeated(b'{"prompt":"', b'\\"', b'"}'),
        repeated(b'{"prompt":"', b"\\ud83d\\ude00", b'"}'),
        repeated(b'{"prompt":"x"', b" ", b"}"),
        b'{"prompt":"x",' + b",".join(b'"%06d":1' % number for number in range(MAX_JSON_STRINGS - 10)) + b"}",
        b'{"prompt":"x","logit_bias":{' + b",".join(b'"%06d":1' % i for i in range(MAX_JSON_STRINGS - 10)) + b"}}",
        repeated(b'{"prompt":"x","metadata":[{}', b",{}", b"]}", MAX_JSON_CONTAINERS - 10),
        repeated(b'{"prompt":[1', b"," + b"9" * MAX_JSON_DIGITS, b"]}"),
    ],
    ids=["ids", "numbers", "outputs", "escapes", "pairs", "spaces", "fields", "biases", "objects", "long-numbers"],
)
def test_no_body_of_the_usual_size_holds_others_up(body: bytes) -> None:
    """A tenth of a second is the aim; a machine that does much else besides may take three times as long."""
    assert min(decoding_s(body) for _ in range(3)) < 0.3


def decoding_s(body: bytes) -> float:
    began = time.thread_time()
    with contextlib.suppress(InvalidArgumentError):
        CompletionRequest.read(decode_object(body)).generations()
    return time.thread_time() - began


def test_bodies_grow_with_the_longest_model_up_to_the_longest_prompt() -> None:
    assert BodyLimits.of(0) == BodyLimits.of(131_072) == BodyLimits(MAX_BODY_BYTES, MAX_JSON_COMMAS)
    assert BodyLimits.of(1_000_000) == BodyLimits(16_000_000, 2_000_000)
    longest = BodyLimits.of(100_000_000)
    assert longest.num_bytes == LARGEST_BODY_BYTES > 2 * MAX_PROMPT_BYTES + 1024
    assert longest.num_commas > MAX_TOKEN_IDS
