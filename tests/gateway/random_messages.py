"""Random messages of any type, for tests that send everything that a client could."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)

MAX_DEPTH = 4
_INT32, _UINT32 = (-(2**31), 2**31 - 1), (0, 2**32 - 1)
_INT64, _UINT64 = (-(2**63), 2**63 - 1), (0, 2**64 - 1)
_RANGES = {
    FieldDescriptor.TYPE_INT32: _INT32,
    FieldDescriptor.TYPE_SINT32: _INT32,
    FieldDescriptor.TYPE_UINT32: _UINT32,
    FieldDescriptor.TYPE_INT64: _INT64,
    FieldDescriptor.TYPE_SINT64: _INT64,
    FieldDescriptor.TYPE_UINT64: _UINT64,
}


def messages(kind: type[M], *, base: M | None = None) -> st.SearchStrategy[M]:
    """Messages of one type.

    Args:
        kind: the type.
        base: what they are changed from, where only a message that is nearly right gets far; empty by default.
    """
    return _messages(kind, base)


@st.composite
def _messages(draw: st.DrawFn, kind: type[M], base: M | None) -> M:
    message = kind()
    if base is not None:
        message.CopyFrom(base)
    _change(draw, message, MAX_DEPTH)
    return message


def _change(draw: st.DrawFn, message: Message, depth: int) -> None:
    """Sets some fields; of a oneof the last one counts."""
    by_number = message.DESCRIPTOR.fields_by_number
    if by_number:
        for number in draw(st.lists(st.sampled_from(sorted(by_number)), max_size=4, unique=True)):
            _set(draw, message, by_number[number], depth)


def _set(draw: st.DrawFn, message: Message, field: Any, depth: int) -> None:
    target = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _fill_map(draw, target, field.message_type)
    elif field.message_type is not None:
        for part in [target.add() for _ in range(draw(st.integers(1, 3)))] if field.is_repeated else [target]:
            part.SetInParent()
            if depth > 0:
                _change(draw, part, depth - 1)
    elif field.is_repeated:
        target.extend(draw(st.lists(_scalars(field), max_size=4)))
    else:
        setattr(message, field.name, draw(_scalars(field)))


def _fill_map(draw: st.DrawFn, target: Any, entry: Descriptor) -> None:
    key, value = (entry.fields_by_name[name] for name in ("key", "value"))
    if value.message_type is not None:
        target[draw(_scalars(key))].SetInParent()
    else:
        target.update(draw(st.dictionaries(_scalars(key), _scalars(value), max_size=3)))


def _scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in _RANGES:
        least, most = _RANGES[field.type]
        return st.one_of(st.integers(max(least, -2), 64), st.integers(least, most))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return st.one_of(st.floats(0, 1, width=32), st.floats(width=32))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=8)
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
