"""What is said about a field that is wrong: its path as the client wrote it, the value, and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic

from holdback.errors import InvalidArgumentError

MAX_SHOWN_CHARS = 100

_LIMITS = {
    "greater_than_equal": "at least {ge}",
    "greater_than": "above {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "below {lt}",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "too_long": "at most {max_length} entries",
    "too_short": "at least {min_length} entries",
    "string_too_long": "at most {max_length} characters",
}
"""What pydantic found, in the words of our own checks."""


def wrong(field: str, value: object, limit: str) -> InvalidArgumentError:
    """The usual sentence, `top_p is 1.5; allowed: [0, 1]`; of what is large it tells the size."""
    shown = show(value)
    return InvalidArgumentError(f"{field} is {shown}; allowed: {limit}", field=field, value=shown, limit=limit)


def unknown(field: str, value: object) -> InvalidArgumentError:
    """A field that nobody knows is refused, for what asks for nothing known would be dropped in silence."""
    message = f"{field} is not known; allowed: the fields of the OpenAPI document"
    return InvalidArgumentError(message, field=field, value=show(value), limit="known fields")


def show(value: object) -> str:
    """A value of JSON for people, shortened."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, str):
        return repr(shorten(value))
    return shorten(str(value) if isinstance(value, float) else json.dumps(value))


def shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def check_asks_for_nothing(field: str, value: Any, neutral: Sequence[Any]) -> None:
    """A field that is not supported may be there as long as it asks for nothing. Raises InvalidArgumentError."""
    if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral):
        allowed = " or ".join(json.dumps(one) for one in neutral)
        raise wrong(field, value, f"{allowed}, for this is not supported")


def from_pydantic(error: pydantic.ValidationError) -> InvalidArgumentError:
    """The first problem that pydantic found."""
    problem = error.errors(include_url=False)[0]
    path = [shorten(str(part)) for part in problem["loc"]]
    field = path[0] + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path[1:])
    if problem["type"] == "extra_forbidden":
        return unknown(field, problem["input"])
    if problem["type"] == "missing":
        return InvalidArgumentError(f"{field} is required", field=field, value="not set", limit="set")
    pattern = _LIMITS.get(problem["type"])
    limit = problem["msg"] if pattern is None else pattern.format_map(_numbers(problem.get("ctx", {})))
    return wrong(field, problem["input"], limit)


def _numbers(context: Mapping[str, Any]) -> dict[str, Any]:
    return {key: f"{value:g}" if isinstance(value, float) else value for key, value in context.items()}
