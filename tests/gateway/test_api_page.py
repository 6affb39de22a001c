"""docs/api.md says what the code does: its bounds are those that are checked; no code, reason or RPC is missing."""

from __future__ import annotations

import pathlib
import re

import pytest
from google.protobuf.descriptor import Descriptor
from smg_grpc_proto import vllm_engine_pb2

from gateway import limits
from gateway.chat import MAX_RENDERED_BYTES
from gateway.malformed import MAX_FIELDS, MAX_UNCOUNTED_BYTES, MIN_NUMBER_LIMIT
from gateway.template_workers import MESSAGE_CHARS, TURN_LIMITS
from gateway.tokenizer import CHARS_PER_TOKEN, LANES
from gateway.turns import CALL_CHARS, PATIENCE_S
from gateway.vllm_engine.service import MAX_ABORT_IDS
from holdback import rpc
from holdback.errors import ErrorReason, HoldbackError
from holdback.request_limits import (
    BIAS_RANGE,
    MAX_CACHE_SALT_BYTES,
    MAX_REQUEST_ID_BYTES,
    MAX_TOKEN_ID_LIST,
    MAX_TRACE_BYTES,
    RANGES,
)
from holdback.v1 import inference_pb2, types_pb2

PAGE = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
IN_VOCABULARY = "each in [0, vocab_size)"
BOUNDS = {
    "`model`": f"at most {limits.MAX_MODEL_NAME_BYTES} bytes",
    "`request_id`": f"at most {MAX_REQUEST_ID_BYTES} bytes; "
    f"{MAX_REQUEST_ID_BYTES - limits.CHOICE_SUFFIX_BYTES} with `n` above 1; empty: one is made",
    "`text`": f"at most {limits.MAX_PROMPT_BYTES} bytes",
    "`chat.messages`": f"[1, {limits.MAX_MESSAGES}], together at most {limits.MAX_PROMPT_BYTES} bytes",
    "`chat.messages[].role`": f"1 to {limits.MAX_ROLE_BYTES} bytes",
    "`token_ids`": f"at most {limits.MAX_TOKEN_IDS} entries, {IN_VOCABULARY}",
    "prompt, however it came": "[1, max_model_len - 1] tokens",
    "text and conversations for `Tokenize`": f"at most {limits.MAX_TOKEN_IDS} tokens, as many as `Detokenize` takes",
    "what a chat template writes": f"at most {MAX_RENDERED_BYTES} bytes",
    "`n`": str(limits.N_RANGE),
    "`stop`": f"at most {limits.MAX_STOP_STRINGS} entries, each 1 to {limits.MAX_STOP_STRING_BYTES} bytes",
    "`keep_special_tokens`": "any",
    "`echo`": "any",
    "`priority`": str(limits.PRIORITY_RANGE),
    "`cache_salt`": f"at most {MAX_CACHE_SALT_BYTES} bytes",
    "`output_token_ids`": f"at most {limits.MAX_TOKEN_IDS} entries and `max_tokens`, {IN_VOCABULARY}; "
    "with `n` 1 and a seed",
    **{f"`sampling.{name}`": str(allowed) for name, allowed in RANGES.items()},
    "`sampling.top_k`": "at least 1; 0 or -1 for all",
    "`sampling.seed`": "any; unset: one is drawn and told",
    "`sampling.max_tokens`": "at least 1, cut to what fits; unset: the pool's default",
    "`sampling.min_tokens`": "at most `max_tokens`",
    "`sampling.ignore_eos`": "any",
    "`sampling.stop_token_ids`": f"at most {MAX_TOKEN_ID_LIST} entries, {IN_VOCABULARY}",
    "`sampling.allowed_token_ids`": f"1 to {MAX_TOKEN_ID_LIST} entries, {IN_VOCABULARY}",
    "`sampling.logit_bias`": f"at most {MAX_TOKEN_ID_LIST} entries, each token once and in [0, vocab_size)",
    "`sampling.logit_bias[].bias`": str(BIAS_RANGE),
    "`traceparent`, `tracestate` (metadata)": f"at most {MAX_TRACE_BYTES} bytes, else ignored",
    "`request_ids` of the engine protocol's `Abort`": f"at most {MAX_ABORT_IDS} entries",
}


def section(title: str) -> str:
    """What stands under a heading, up to the next one of the same level or above."""
    level = title.partition(" ")[0]
    found = re.search(rf"^{re.escape(title)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def table(title: str) -> list[list[str]]:
    """The rows of the first table under a heading."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def fields_of(message: Descriptor) -> set[str]:
    return {field.name for field in message.fields}


@pytest.mark.case("B70")
def test_the_table_of_bounds_has_the_bounds_that_are_checked() -> None:
    rows = table("## Bounds")
    assert {name: allowed for name, allowed in rows if name in BOUNDS} == BOUNDS
    assert len({name for name, _ in rows}) == len(rows)


@pytest.mark.case("B70")
def test_every_field_of_a_request_has_a_bound() -> None:
    names = {name.strip("`").removesuffix("[]") for name in BOUNDS}
    fields = fields_of(inference_pb2.Generation.DESCRIPTOR) - {"chat", "sampling"}
    fields |= {f"sampling.{name}" for name in fields_of(types_pb2.SamplingParams.DESCRIPTOR)} | {"chat.messages"}
    assert fields <= names


def test_the_table_of_turns_has_the_limits_of_the_tokenizer_and_the_words_those_of_templates() -> None:
    numbers = [(lane.max_text_chars, lane.max_num_tokens, lane.max_threads, lane.max_chars) for lane in LANES]
    assert [row[:-1] for row in table("## Turns")] == [[f"{number:,}" for number in row] for row in numbers]
    words = " ".join(section("## Turns").split())
    assert f"with {TURN_LIMITS.max_chars:,} characters at once" in words
    assert f"the longest for {PATIENCE_S:g} s" in words
    assert f"counts {CALL_CHARS} characters more" in words
    assert MESSAGE_CHARS == CALL_CHARS
    assert CHARS_PER_TOKEN == 4


def test_the_page_says_which_requests_have_their_fields_counted_and_what_they_may_have() -> None:
    words = " ".join(section("### Health, reflection, connections").split())
    assert f"A request of more than {MAX_UNCOUNTED_BYTES:,} bytes may have {MAX_FIELDS:,} fields" in words
    assert f"and {MIN_NUMBER_LIMIT:,} at least" in words


def test_every_status_code_and_reason_is_listed_once() -> None:
    rows = table("### Status codes")
    assert sorted(code for code, *_ in rows) == sorted({code.name for code in rpc.STATUS_CODES.values()})
    words = " ".join(section("### Status codes").split())
    inner = re.search(r"([A-Z_, ]+ and [A-Z_]+) are said between the services only", words)
    assert inner is not None
    listed = [reason for _, reasons, _ in rows for reason in reasons.split(", ")]
    listed += re.split(r", | and ", inner[1].strip())
    assert sorted(listed) == sorted(ErrorReason.__members__)


def test_the_default_reason_of_an_exception_stands_beside_its_code() -> None:
    reasons = {code: listed.split(", ") for code, listed, _ in table("### Status codes")}
    classes: list[type[HoldbackError]] = list(rpc.STATUS_CODES)
    assert all(cls.default_reason.name in reasons[rpc.STATUS_CODES[cls].name] for cls in classes)


SERVICES = {
    "## gRPC": inference_pb2.DESCRIPTOR.services_by_name["InferenceService"],
    "## The engine protocol of vLLM": vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],
}


@pytest.mark.parametrize("title", SERVICES)
def test_every_rpc_is_listed_in_the_section_of_its_service(title: str) -> None:
    service = SERVICES[title]
    assert service.full_name in section(title)
    listed = re.findall(r"`(\w+)`", " ".join(row[0] for row in table(title)))
    assert sorted(listed) == sorted(method.name for method in service.methods)
