"""The wire form of protocol buffers, as far as it takes to count the fields of a message without making them."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}


def has_more_fields(data: bytes, descriptor: Descriptor, limit: int) -> bool:
    """Whether a message has more than `limit` fields, those of messages within it included.

    Entries of a repeated field count one each, unless they are packed as all current writers pack numbers. Bytes that
    are no message have the fields before the first that is none; to refuse them is for the parser.
    """
    num_fields = 0
    messages = [(0, len(data), descriptor)]
    while messages:
        position, end, kind = messages.pop()
        while position < end:
            num_fields += 1
            if num_fields > limit:
                return True
            tag, position = _varint(data, position, end)
            wire_type = tag & 7
            if wire_type == _BYTES:
                size, position = _varint(data, position, end)
                inner = _message_of(kind, tag >> 3)
                if inner is not None:
                    messages.append((position, min(position + size, end), inner))
                position += size
            elif wire_type == _VARINT:
                _, position = _varint(data, position, end)
            else:
                position += _SIZES.get(wire_type, end)
    return False


def _message_of(kind: Descriptor, number: int) -> Descriptor | None:
    """What a field holds; None for anything but a message."""
    field = kind.fields_by_number.get(number)
    return field.message_type if field is not None and field.type == FieldDescriptor.TYPE_MESSAGE else None


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """The number at a position, and the position after it: `end` for one that is cut off."""
    value = shift = 0
    while position < end:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            break
    return 0, end
