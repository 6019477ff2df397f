"""Incremental detokenization and stop strings."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream

# Prompt tokens that the decoder gets first, so that the first new token keeps its leading space.
_CONTEXT_TOKENS = 8


class TextBuilder:
    """The text of one request, built token by token.

    Attributes:
        text: all text so far. It is truncated before the stop string once one is found.
        pieces: the text that each token added.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: list[int],
        stop: tuple[str, ...],
        min_tokens: int = 0,
    ) -> None:
        """Start with an empty text.

        Args:
            tokenizer: a fast tokenizer; ``None`` for no text.
            prompt_ids: tokens of the prompt.
            stop: strings that end the text.
            min_tokens: stop strings in the text of the first ``min_tokens`` tokens are ignored.
        """
        self.text = ""
        self.pieces: list[str] = []
        self._backend = None if tokenizer is None else tokenizer.backend_tokenizer
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._min_tokens = min_tokens
        # Length of the text's prefix in which stop strings are ignored.
        self._exempt = 0
        self._released = 0
        # End of the released text: index of the piece, and number of its characters released.
        self._piece, self._offset = 0, 0
        self._pending: list[int] = []
        self._stream = DecodeStream(skip_special_tokens=True)
        context = prompt_ids[-_CONTEXT_TOKENS:]
        if self._backend is not None and self._stream.step(self._backend, context) is None:
            # The prompt ends inside a character: restart, so that its bytes are not repeated.
            self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> bool:
        """Append a token. Returns True if its text completed a stop string."""
        if self._backend is None:
            self.pieces.append("")
            return False
        self._pending.append(token)
        try:
            piece = self._stream.step(self._backend, token)
        except Exception as error:
            if not str(error).startswith("Invalid prefix"):
                raise
            # With byte fallback, an invalid byte changes how the valid ones before it are decoded.
            # They are part of the text already, so only the pending tokens are decoded again.
            self._stream = DecodeStream(skip_special_tokens=True)
            piece = self._stream.step(self._backend, list(self._pending))
        if piece is None:
            self.pieces.append("")
            return False
        self._pending.clear()
        return self._append(piece)

    def add_silent(self, token: int) -> None:
        """Append a token that ends the text and adds no text itself."""
        self.pieces.append("")

    def finish(self) -> None:
        """Append the bytes of an incomplete character at the end."""
        if self._pending and self._backend is not None and self.pieces:
            rest = self._backend.decode(self._pending, skip_special_tokens=True)
            self._pending.clear()
            self.text += rest
            self.pieces[-1] += rest
        self._longest_stop = 0

    def release(self) -> list[tuple[int, str]]:
        """New text that can no longer be part of a stop string, with the index of its token."""
        end = max(self._released, len(self.text) - self._held_back())
        left, self._released = end - self._released, end
        released = []
        while left:
            text = self.pieces[self._piece][self._offset : self._offset + left]
            if text:
                released.append((self._piece, text))
                left -= len(text)
                self._offset += len(text)
            else:
                self._piece, self._offset = self._piece + 1, 0
        return released

    def _held_back(self) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        for length in range(min(self._longest_stop - 1, len(self.text) - self._exempt), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _append(self, piece: str) -> bool:
        search_from = max(self._exempt, len(self.text) - self._longest_stop + 1)
        self.text += piece
        self.pieces.append(piece)
        if len(self.pieces) <= self._min_tokens:
            self._exempt = len(self.text)
            return False
        found = [at for stop in self._stop if (at := self.text.find(stop, search_from)) >= 0]
        if not found:
            return False
        self._cut(min(found))
        return True

    def _cut(self, length: int) -> None:
        excess = len(self.text) - length
        self.text = self.text[:length]
        for index in range(len(self.pieces) - 1, -1, -1):
            if excess <= 0:
                break
            kept = max(0, len(self.pieces[index]) - excess)
            excess -= len(self.pieces[index]) - kept
            self.pieces[index] = self.pieces[index][:kept]
