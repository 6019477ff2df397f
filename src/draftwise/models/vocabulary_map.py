"""The tokens that two vocabularies share, and translation between them.

A draft with another vocabulary than the target's proposes only tokens that both have (token-level
intersection, Timor et al. 2025, arXiv 2502.05202). Its distribution is restricted to them before a
token is drawn, so the acceptance law holds as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from draftwise.models.packed_model import PackedModel
from draftwise.models.segment import Segment
from draftwise.token_bytes import byte_of, token_bytes

_MISSING = -1
# Entries that fill a vocabulary up to the width of the logits, as converters to GGUF name them.
_FILLER = re.compile(r"\[PAD\d+\]")
# The text on which the share of the shared tokens is measured: prose, figures, a dialogue, code.
_SAMPLE = """\
The library opens at nine in the morning and closes at six. Last year it lent 48,210 books, which
is 12.5% more than the year before. "Why did that happen?" asked the mayor. Anna, who has worked
there since 1998, thought for a moment: "We moved the children's shelves to the front, and we
stopped charging fees." Each of the 3 branches then got 2 new readers' desks, so there are 3 * 2 = 6
new desks in all.

def mean(values):
    \"\"\"Return the arithmetic mean.\"\"\"
    total = 0.0
    for value in values:
        total += value
    return total / len(values)
"""


class VocabularyMap:
    """One-to-one mapping between some of a model's own tokens and tokens of the target.

    Attributes:
        own_ids: ``[shared]`` int64, the model's own ids of the shared tokens, in ascending order.
        target_ids: ``[shared]`` int64, the target's ids of the same tokens.
        own_size: size of the model's own vocabulary.
        target_size: size of the target's vocabulary.
    """

    def __init__(self, pairs: Mapping[int, int], own_size: int, target_size: int) -> None:
        """Set up.

        Args:
            pairs: own ids and the target's ids of the same tokens. No target id occurs twice.
            own_size: size of the model's own vocabulary.
            target_size: size of the target's vocabulary.
        """
        if len(set(pairs.values())) < len(pairs):
            raise ValueError("two tokens are mapped to one")
        own_ids = sorted(pairs)
        self.own_ids = torch.tensor(own_ids, dtype=torch.long)
        self.target_ids = torch.tensor([pairs[own] for own in own_ids], dtype=torch.long)
        self.own_size, self.target_size = own_size, target_size
        self._to_own = torch.full((target_size,), _MISSING, dtype=torch.long)
        self._to_own[self.target_ids] = self.own_ids
        self._own_by_target = {target: own for own, target in pairs.items()}

    def __len__(self) -> int:
        """Number of shared tokens."""
        return len(self.own_ids)

    def to(self, device: torch.device) -> VocabularyMap:
        """Move the tensors to a device."""
        self.own_ids, self.target_ids = self.own_ids.to(device), self.target_ids.to(device)
        self._to_own = self._to_own.to(device)
        return self

    def own_id(self, target_id: int) -> int | None:
        """The model's own id of a token of the target; ``None`` if the token is not shared."""
        return self._own_by_target.get(target_id)

    def own_tokens(self, target_ids: Tensor) -> Tensor:
        """Own ids of shared tokens of the target.

        Args:
            target_ids: int64. Tokens that are not shared become token 0.
        """
        return self._to_own[target_ids].clamp(min=0)

    def target_logits(self, logits: Tensor) -> Tensor:
        """The logits of the shared tokens, over the target's vocabulary.

        Args:
            logits: ``[rows, own]``, with at least ``own_size`` columns.

        Returns:
            ``[rows, target]``, −∞ where a token is not shared.
        """
        wide = logits.new_full((len(logits), self.target_size), float("-inf"))
        wide[:, self.target_ids] = logits[:, self.own_ids]
        return wide


class TokenTranslator:
    """Translates the target's tokens to those of a model with another tokenizer.

    Attributes:
        vocabulary: the tokens that both share.
    """

    def __init__(
        self, target_tokenizer: Any, own_tokenizer: Any, target_size: int, own_size: int
    ) -> None:
        """Compare two vocabularies.

        Tokens are the same if they stand for the same bytes. The two end-of-sequence tokens are
        the same, and so are special tokens of one name. Where a vocabulary has several tokens for
        the same bytes, only one of them is mapped.

        Args:
            target_tokenizer: the target's fast tokenizer.
            own_tokenizer: the model's fast tokenizer.
            target_size: width of the target's logits; tokens beyond it are left out.
            own_size: width of the model's logits; tokens beyond it are left out.
        """
        self._target_tokenizer, self._tokenizer = target_tokenizer, own_tokenizer
        self._target_bytes = _within(token_bytes(target_tokenizer), target_size)
        self._own_bytes = _within(token_bytes(own_tokenizer), own_size)
        self._own_by_bytes = _by_bytes(self._own_bytes, own_tokenizer)
        self._longest = max(map(len, self._own_by_bytes), default=0)
        pairs = {
            self._own_by_bytes[value]: token
            for value, token in _by_bytes(self._target_bytes, target_tokenizer).items()
            if value in self._own_by_bytes
        }
        special = _special_pairs(target_tokenizer, own_tokenizer, target_size, own_size)
        # An end-of-sequence token may be an ordinary token of its vocabulary, too.
        taken = set(special.values())
        pairs = {own: token for own, token in pairs.items() if token not in taken} | special
        self.vocabulary = VocabularyMap(pairs, own_size, target_size)
        self._prefix: list[int] = own_tokenizer("").input_ids
        self._known: dict[int, tuple[int, ...]] = {}

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """Tokenize a prompt anew.

        Args:
            tokens: the prompt in the target's tokens.

        Returns:
            The prompt in own tokens, with the tokens that the model's tokenizer adds at the
            beginning. Special tokens that are not shared are left out.
        """
        own, run = list(self._prefix), list[int]()
        for token in tokens:
            if token in self._target_bytes:
                run.append(token)
                continue
            own += self._text(run)
            run.clear()
            special = self.vocabulary.own_id(token)
            if special is not None:
                own.append(special)
        return own + self._text(run)

    def token(self, token: int) -> tuple[int, ...]:
        """The own tokens that one token of the target corresponds to.

        It is one token if the token is shared, none if it is a special token that is not shared,
        and otherwise its bytes tokenized anew.
        """
        own = self.vocabulary.own_id(token)
        if own is not None:
            return (own,)
        if token not in self._known:
            self._known[token] = tuple(self._encode(self._target_bytes.get(token, b"")))
        return self._known[token]

    def _text(self, tokens: Sequence[int]) -> list[int]:
        """Tokenize a run of ordinary tokens anew."""
        if not tokens:
            return []
        try:
            text = b"".join(self._target_bytes[token] for token in tokens).decode()
        except UnicodeDecodeError:  # the prompt begins or ends within a character
            return [own for token in tokens for own in self.token(token)]
        own: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return own

    def _encode(self, value: bytes) -> list[int]:
        """Tokenize the bytes of one token, as they stand within a text."""
        # Tokenizers treat the beginning of a text specially, so that it follows another character.
        for before in ("\n", "."):
            try:
                text = before + value.decode()
            except UnicodeDecodeError:
                break
            first, *own = self._tokenizer(text, add_special_tokens=False).input_ids or [0]
            if self._own_bytes.get(first) == before.encode() and value == b"".join(
                self._own_bytes.get(token, b"") for token in own
            ):
                return own
        return self._longest_matches(value)

    def _longest_matches(self, value: bytes) -> list[int]:
        """Divide bytes into own tokens, each as long as possible. Unknown bytes are left out."""
        own, start = [], 0
        while start < len(value):
            for end in range(min(len(value), start + self._longest), start, -1):
                token = self._own_by_bytes.get(value[start:end])
                if token is not None:
                    own.append(token)
                    break
            else:
                end = start + 1
            start = end
        return own


def is_same_vocabulary(first: Any, second: Any) -> bool:
    """Whether two tokenizers have the same tokens.

    One of the two may have added tokens, such as those of a chat template, if the other has no
    tokens with their ids. Fillers do not count.
    """
    differing = _without_fillers(first) ^ _without_fillers(second)
    added = first.added_tokens_decoder.keys() | second.added_tokens_decoder.keys()
    ids = [token for _, token in differing]
    return len(set(ids)) == len(ids) and added >= set(ids)


def _without_fillers(tokenizer: Any) -> set[tuple[str, int]]:
    entries: dict[str, int] = tokenizer.get_vocab()
    return {(text, token) for text, token in entries.items() if not _FILLER.fullmatch(text)}


@torch.inference_mode()
def probability_share(
    model: PackedModel, tokenizer: Any, vocabulary: VocabularyMap, max_tokens: int
) -> float:
    """How much of a model's probability the shared tokens hold, on average over a sample text.

    Args:
        model: the draft or companion.
        tokenizer: its tokenizer.
        vocabulary: the tokens that it shares with the target.
        max_tokens: the sample text is cut to this length.
    """
    tokens = tokenizer(_SAMPLE).input_ids[:max_tokens]
    cache = model.new_cache(1, len(tokens), len(tokens))
    logits = model.forward(cache, tokens, [Segment(0, 0, len(tokens))], range(len(tokens)))
    assert logits is not None
    probs = logits[:, : vocabulary.own_size].float().softmax(dim=-1)
    return float(probs[:, vocabulary.own_ids.to(probs.device)].sum(dim=-1).mean())


def _within(found: Mapping[int, bytes], size: int) -> dict[int, bytes]:
    return {token: value for token, value in found.items() if token < size}


def _by_bytes(found: Mapping[int, bytes], tokenizer: Any) -> dict[bytes, int]:
    """The token for each sequence of bytes. Byte-fallback entries give way to ordinary ones."""
    tokens: dict[bytes, int] = {}
    for token in sorted(found):
        value = found[token]
        other = tokens.get(value)
        is_taken = other is not None and byte_of(tokenizer.convert_ids_to_tokens(other)) is None
        if value and not is_taken:
            tokens[value] = token
    return tokens


def _special_pairs(target: Any, own: Any, target_size: int, own_size: int) -> dict[int, int]:
    """Special tokens that are the same."""

    def special(tokenizer: Any, size: int) -> dict[str, int]:
        added = tokenizer.added_tokens_decoder
        return {
            each.content: token
            for token, each in added.items()
            if each.special and token < size and token != tokenizer.eos_token_id
        }

    ours, theirs = special(own, own_size), special(target, target_size)
    pairs = {ours[name]: theirs[name] for name in ours.keys() & theirs.keys()}
    ends = own.eos_token_id, target.eos_token_id
    if None not in ends and ends[0] < own_size and ends[1] < target_size:
        pairs[ends[0]] = ends[1]
    return pairs
