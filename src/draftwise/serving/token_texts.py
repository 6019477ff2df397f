"""Texts and bytes of single tokens."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_REPLACEMENT = "\ufffd"
# Names of byte tokens in vocabularies with byte fallback.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CACHED = 100_000


class TokenTexts:
    """Converts single tokens to text and bytes, with a cache."""

    def __init__(self, tokenizer: Any) -> None:
        """Wrap a fast tokenizer; ``None`` if there is none."""
        self._tokenizer = tokenizer
        self._known = lru_cache(_CACHED)(self._look_up)

    def __call__(self, token: int) -> tuple[str, list[int]]:
        """Return the text and the bytes of a token; a partial character has bytes but no text."""
        return self._known(token)

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        if self._tokenizer is None:
            return f"token_id:{token}", []
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT not in text:
            return text, list(text.encode())
        name: str = self._tokenizer.convert_ids_to_tokens(token) or ""
        byte = _BYTE.fullmatch(name)
        if byte is not None:
            return text, [int(byte[1], 16)]
        alphabet = _byte_alphabet()
        if all(letter in alphabet for letter in name):
            return text, [alphabet[letter] for letter in name]
        return text, list(text.encode())


@lru_cache(1)
def _byte_alphabet() -> dict[str, int]:
    """Mapping from the characters of byte-level vocabularies to bytes (Radford et al. 2019, GPT-2).

    Printable bytes are represented by themselves, and other bytes by the characters from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}
