"""Texts and bytes of single tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from draftwise.token_bytes import byte_alphabet, byte_of

_REPLACEMENT = "\ufffd"
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
        byte = byte_of(name)
        if byte is not None:
            return text, [byte]
        alphabet = byte_alphabet()
        if all(letter in alphabet for letter in name):
            return text, [alphabet[letter] for letter in name]
        return text, list(text.encode())
