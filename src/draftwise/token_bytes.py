"""The bytes that each token of a vocabulary stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

# Names of byte tokens in vocabularies with byte fallback.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# What SentencePiece writes for a space.
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """The bytes of each ordinary token of a fast tokenizer.

    Entries of different kinds of vocabularies become comparable: byte-level BPE writes a space as
    ``Ġ``, SentencePiece as ``▁``, and byte fallback writes a byte as ``<0x0A>``.

    Returns:
        Token ids and their bytes. Special tokens are left out, as they stand for no text.
    """
    kinds = set(_decoder_kinds(tokenizer))
    added = tokenizer.added_tokens_decoder
    is_byte_level = "ByteLevel" in kinds
    alphabet = byte_alphabet()
    found: dict[int, bytes] = {}
    for entry, token in tokenizer.get_vocab().items():
        if token in added and added[token].special:
            continue
        if is_byte_level and token not in added and all(letter in alphabet for letter in entry):
            found[token] = bytes(alphabet[letter] for letter in entry)
            continue
        found[token] = _plain_bytes(entry, kinds)
    return found


def byte_of(entry: str) -> int | None:
    """The byte of an entry of byte fallback, such as ``<0x0A>``; ``None`` for other entries."""
    byte = _BYTE.fullmatch(entry)
    return None if byte is None else int(byte[1], 16)


@lru_cache(1)
def byte_alphabet() -> Mapping[str, int]:
    """Mapping from the characters of byte-level vocabularies to bytes (Radford et al. 2019, GPT-2).

    Printable bytes are represented by themselves, and other bytes by the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


def _plain_bytes(entry: str, kinds: set[str]) -> bytes:
    if "ByteFallback" in kinds:
        byte = byte_of(entry)
        if byte is not None:
            return bytes([byte])
    if kinds & {"Replace", "Metaspace"}:
        return entry.replace(_SPACE_MARK, " ").encode()
    if "WordPiece" in kinds:
        return entry[2:].encode() if entry.startswith("##") else b" " + entry.encode()
    return entry.encode()


def _decoder_kinds(tokenizer: Any) -> Iterator[str]:
    """The types of a tokenizer's decoders."""
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        return
    waiting = [json.loads(decoder.__getstate__())]
    while waiting:
        each = waiting.pop()
        yield each["type"]
        waiting += each.get("decoders", [])
