"""Incremental detokenization and stop strings."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream

# Prompt tokens that the decoder gets first, so that the first new token keeps its leading space.
_CONTEXT_TOKENS = 8


class TextBuilder:
    """The text of one request, built token by token.

    Special tokens have no text. A stop string ends the text where it occurs in the text, or in the
    text with special tokens, so that it may contain them.

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
        # The special tokens that a stop string may still contain: each with the index in the text
        # at which it was left out.
        self._specials: list[tuple[int, str]] = []
        # Text of the incomplete character before the last of them.
        self._incomplete = ""
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
            return self._add_special(token)
        self._pending.clear()
        return self._append(piece)

    def add_silent(self, token: int) -> None:
        """Append a token that ends the text and adds no text itself."""
        self.pieces.append("")
        self._add_special(token)

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
        """Length of the text's end that may become a part of a stop string."""
        if not self._longest_stop:
            return 0
        unfinished = self._unfinished(self.text, self._exempt)
        if self._specials:
            tail, places = self._tail()
            length = self._unfinished(tail)
            if length:
                unfinished = max(unfinished, len(self.text) - places[-length])
        return unfinished

    def _unfinished(self, text: str, start: int = 0) -> int:
        """Length of the longest suffix of ``text[start:]`` that is a prefix of a stop string."""
        for length in range(min(self._longest_stop - 1, len(text) - start), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _append(self, piece: str) -> bool:
        search_from = max(self._exempt, len(self.text) - self._longest_stop + 1)
        self.text += piece
        self.pieces.append(piece)
        self._incomplete = ""
        if len(self.pieces) <= self._min_tokens:
            self._exempt = len(self.text)
            return False
        found = [at for stop in self._stop if (at := self.text.find(stop, search_from)) >= 0]
        if self._specials:
            found += self._found_with_specials()
        if not found:
            return False
        self._cut(min(found))
        return True

    def _add_special(self, token: int) -> bool:
        """Note a token without text. Returns True if it is special and completed a stop string."""
        if not self._stop or self._backend is None or len(self.pieces) <= self._min_tokens:
            return False
        if self._backend.decode([token], skip_special_tokens=True):
            return False  # a part of a character
        if not self._backend.decode([token], skip_special_tokens=False):
            return False
        self._incomplete = self._backend.decode(self._pending, skip_special_tokens=True)
        at = len(self.text) + len(self._incomplete)
        self._specials.append((at, self._backend.id_to_token(token)))
        found = self._found_with_specials()
        if not found:
            return False
        self.finish()
        self._cut(min(found))
        return True

    def _found_with_specials(self) -> list[int]:
        """Search the text with special tokens, and forget those that are too far from its end.

        Returns:
            For each stop string found, the index in the text at which it begins.
        """
        tail, places = self._tail()
        found = [places[at] for stop in self._stop if (at := tail.find(stop)) >= 0]
        num_following = 0
        for index, (at, special) in reversed(list(enumerate(self._specials))):
            if num_following + len(self.text) - at >= self._longest_stop - 1:
                del self._specials[: index + 1]
                break
            num_following += len(special)
        return found

    def _tail(self) -> tuple[str, list[int]]:
        """The end of the text with special tokens, and the index in the text of each character."""
        text = self.text + self._incomplete
        start = max(self._exempt, self._specials[0][0] - self._longest_stop + 1)
        tail, places = "", []
        for index, special in [*self._specials, (len(text), "")]:
            # An incomplete character may have become shorter when the rest of it arrived.
            at = min(index, len(text))
            tail += text[start:at] + special
            places += [*range(start, at), *[at] * len(special)]
            start = max(start, at)
        return tail, places

    def _cut(self, length: int) -> None:
        excess = len(self.text) - length
        self.text = self.text[:length]
        for index in range(len(self.pieces) - 1, -1, -1):
            if excess <= 0:
                break
            kept = max(0, len(self.pieces[index]) - excess)
            excess -= len(self.pieces[index]) - kept
            self.pieces[index] = self.pieces[index][:kept]
