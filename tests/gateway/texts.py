"""Texts as the byte-level tokenizer has them, and what a client has received."""

from __future__ import annotations

from holdback import GenerationStream, Piece
from tests.gateway.small_tokenizers import byte_ids, make_tokenizer

EOS = 2


def ids_of(text: str) -> list[int]:
    """One token for each byte."""
    return byte_ids(make_tokenizer("byte_level"), text.encode())


async def collect(stream: GenerationStream) -> list[Piece]:
    return [piece async for piece in stream]


async def extend(pieces: list[Piece], stream: GenerationStream) -> None:
    """Collects into a list that outlives an error."""
    async for piece in stream:
        pieces.append(piece)


def text_of(pieces: list[Piece], index: int = 0) -> str:
    return "".join(piece.text for piece in pieces if piece.index == index)
