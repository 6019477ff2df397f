"""Tokens to text as they come, and stop strings."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream

# Prompt tokens given to the decoder first, so that the first new token keeps its leading space.
_CONTEXT_TOKENS = 8


class TextBuilder:
    """The text of one request, grown token by token.

    Attributes:
        text: all text so far, cut before a stop string once one was found.
        pieces: what each token added to ``text``.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: list[int],
        stop: tuple[str, ...],
        min_tokens: int = 0,
    ) -> None:
        """Begin with an empty text.

        Args:
            tokenizer: a fast tokenizer; ``None`` for no text.
            prompt_ids: tokens of the prompt.
            stop: strings that end the text.
            min_tokens: stop strings count only after the text of this many tokens.
        """
        self.text = ""
        self.pieces: list[str] = []
        self._backend = None if tokenizer is None else tokenizer.backend_tokenizer
        self._stop = stop
        self._longest_stop = max(map(len, stop), default=0)
        self._min_tokens = min_tokens
        # How much of the text no stop string is looked for in.
        self._exempt = 0
        self._released = 0
        # Where in the pieces the released text ends: which piece, and how much of it.
        self._piece, self._offset = 0, 0
        self._pending: list[int] = []
        self._stream = DecodeStream(skip_special_tokens=True)
        context = prompt_ids[-_CONTEXT_TOKENS:]
        if self._backend is not None and self._stream.step(self._backend, context) is None:
            # The prompt ends inside a character: start afresh rather than repeat its bytes.
            self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token: int) -> bool:
        """Append a token; True if its text completed a stop string."""
        if self._backend is None:
            self.pieces.append("")
            return False
        self._pending.append(token)
        piece = self._stream.step(self._backend, token)
        if piece is None:
            self.pieces.append("")
            return False
        self._pending.clear()
        return self._append(piece)

    def add_silent(self, token: int) -> None:
        """Append a token that ends the text and has none itself."""
        self.pieces.append("")

    def finish(self) -> None:
        """Write out bytes that never became a whole character."""
        if self._pending and self._backend is not None and self.pieces:
            rest = self._backend.decode(self._pending, skip_special_tokens=True)
            self._pending.clear()
            self.text += rest
            self.pieces[-1] += rest
        self._longest_stop = 0

    def release(self) -> list[tuple[int, str]]:
        """New text that no stop string can take back any more, by the number of its token."""
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
        """Length of the longest end of the text with which a stop string begins."""
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
