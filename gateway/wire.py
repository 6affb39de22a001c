"""The wire form of protocol buffers, as far as it takes to count what is in a message without making it."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # 3 and 4 are groups, which no protocol here has; 6 and 7 are nothing
_SIZES = {_FIXED64: 8, _FIXED32: 4}
_MAX_VARINT_BYTES = 10

_NUMBER_BYTES = dict.fromkeys(
    (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FIXED64, FieldDescriptor.TYPE_SFIXED64), 8
)
_NUMBER_BYTES |= dict.fromkeys(
    (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_FIXED32, FieldDescriptor.TYPE_SFIXED32), 4
)
_NOT_LAST_BYTES = bytes(range(0x80, 0x100))  # of a varint


class _NoMessageError(Exception):
    """The bytes are no message; why is its text."""


def fault_of(data: bytes, descriptor: Descriptor, *, max_fields: int, max_numbers: int) -> str | None:
    """Why a message should not be made of these bytes; None if it may be, though the parser may still refuse it.

    Args:
        data: the message.
        descriptor: its type.
        max_fields: of all, those of messages within it included. Entries of a repeated field count one each, save
            those of a packed list, which is one field.
        max_numbers: in all packed lists together.
    """
    num_fields = num_numbers = 0
    messages: list[tuple[int, int, Any]] = [(0, len(data), descriptor)]
    try:
        while messages:
            position, end, kind = messages.pop()
            while position < end:
                num_fields += 1
                if num_fields > max_fields:
                    return f"it has more than {max_fields} fields"
                tag, position = _varint(data, position, end)
                start, position = _value(data, position, end, tag & 7)
                field = kind.fields_by_number.get(tag >> 3) if tag & 7 == _BYTES else None
                if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE:
                    messages.append((start, position, field.message_type))
                elif field is not None and _is_packable(field):
                    num_numbers += _num_numbers(data[start:position], field)
                    if num_numbers > max_numbers:
                        return f"it has more than {max_numbers} numbers in lists"
    except _NoMessageError as error:
        return str(error)
    return None


def _value(data: bytes, position: int, end: int, wire_type: int) -> tuple[int, int]:
    """Where the value of a field starts and ends."""
    if wire_type == _BYTES:
        size, position = _varint(data, position, end)
    elif wire_type == _VARINT:
        return position, _varint(data, position, end)[1]
    elif wire_type in _SIZES:
        size = _SIZES[wire_type]
    else:
        raise _NoMessageError(f"it has a field of wire type {wire_type}")
    if size > end - position:
        raise _NoMessageError("it has a field that is cut off")
    return position, position + size


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """The number at a position, and the position after it."""
    value = 0
    for index in range(position, min(end, position + _MAX_VARINT_BYTES)):
        byte = data[index]
        value |= (byte & 0x7F) << 7 * (index - position)
        if byte < 0x80:
            return value, index + 1
    raise _NoMessageError("it has a number that is cut off")


def _is_packable(field: FieldDescriptor) -> bool:
    return field.is_repeated and field.type not in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def _num_numbers(packed: bytes, field: FieldDescriptor) -> int:
    size = _NUMBER_BYTES.get(field.type)
    return len(packed.translate(None, _NOT_LAST_BYTES)) if size is None else len(packed) // size
