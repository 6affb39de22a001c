"""Requests of very many fields or numbers, which are not read at all.

An empty field is two bytes on the wire and thirty in memory, and to read megabytes of them takes seconds in which
nothing else is done; so what a long request has is counted before it is read.
"""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.descriptor import Descriptor

from gateway.limits import MAX_TOKEN_IDS
from gateway.wire import fault_of

MAX_FIELDS = 16_384
"""More than any request has that the limits of its fields allow; those of messages within it count, too."""

MIN_NUMBER_LIMIT = 256 * 1024
NUMBERS_PER_TOKEN = 2
"""In the lists of a request, for each token of the longest served model, though never fewer than the number above."""

MAX_UNCOUNTED_BYTES = 256 * 1024
"""Of a request that is read as it comes: whatever is in it costs little. Its fields are not counted, and groups are
passed over as unknown fields are."""


def fault_finder(longest_model_len: Callable[[], int]) -> Callable[[bytes, Descriptor], str | None]:
    """What `holdback.malformed.MalformedRequests` asks of each request.

    Args:
        longest_model_len: of the served models; 0 while none is known, when any request may be a right one.
    """

    def find_fault(data: bytes, descriptor: Descriptor) -> str | None:
        if len(data) <= MAX_UNCOUNTED_BYTES:
            return None
        return fault_of(data, descriptor, max_fields=MAX_FIELDS, max_numbers=max_numbers(longest_model_len()))

    return find_fault


def max_numbers(longest_model_len: int) -> int:
    """How many numbers the lists of one request may have. 0 is a length that is not known."""
    longest = min(longest_model_len, MAX_TOKEN_IDS) or MAX_TOKEN_IDS
    return max(MIN_NUMBER_LIMIT, NUMBERS_PER_TOKEN * longest)
