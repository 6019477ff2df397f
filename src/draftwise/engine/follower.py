"""A small model beside the target: its own cache, the same requests, fed what it has not seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwise.engine.request import Request
from draftwise.models.attention import Segment
from draftwise.models.kv_cache import KVCache
from draftwise.models.packed_model import PackedModel
from draftwise.models.static_steps import Decoder, StaticSteps


class Reading(NamedTuple):
    """What a model is to read for one request.

    Attributes:
        request: whose tokens.
        end: read its tokens up to here, from where the cache ends.
        drafted: and then these.
        num_logits: how many of the last tokens read give logits.
    """

    request: Request
    end: int
    drafted: Sequence[int] = ()
    num_logits: int = 0


class Follower:
    """Runs a draft or companion model, which follows the target's requests in its own cache.

    Attributes:
        model: the small model.
        cache: its cache.
        vocab_size: width of the logits that it gives.
        num_rows: requests that fit at once.
        capacity: tokens that fit in a row of its cache.
        device: where it runs.
    """

    def __init__(self, model: PackedModel, cache: KVCache, vocab_size: int) -> None:
        """Set up.

        Args:
            model: the small model.
            cache: its cache, with the target's rows.
            vocab_size: the target's; logits are cut or filled to this width.
        """
        self.model = model
        self.cache = cache
        self.vocab_size = vocab_size
        self.num_rows = cache.num_rows
        self.capacity = cache.capacity
        self.device = model.device

    def read(self, readings: Iterable[Reading]) -> tuple[Tensor | None, int]:
        """Process what is new, in one packed pass.

        Returns:
            ``[sum of num_logits, vocab]`` logits, by row of the cache (``None`` if none were
            wanted), and the number of tokens processed.
        """
        tokens, segments, rows = self.gather(readings)
        if not segments:
            return None, 0
        logits = self.model.forward(self.cache, tokens, segments, rows or None)
        return None if logits is None else self.fit_vocabulary(logits), len(tokens)

    def gather(self, readings: Iterable[Reading]) -> tuple[list[int], list[Segment], list[int]]:
        """Packed tokens, their segments by row, and which tokens' logits are wanted."""
        tokens: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        for request, end, drafted, num_logits in sorted(readings, key=lambda r: r.request.row):
            start = self.cache.lengths[request.row]
            new = [*request.tokens[start : min(end, self.capacity)], *drafted]
            if new:
                tokens.extend(self._readable(new))
                segments.append(Segment(request.row, start, len(new)))
            rows.extend(range(len(tokens) - num_logits, len(tokens)))
        return tokens, segments, rows

    def read_one(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """One token more for each row, by row; ``[rows, vocab]`` logits."""
        segments = [Segment(row, self.cache.lengths[row], 1) for row in rows]
        logits = self.model.forward(self.cache, tokens, segments, range(len(rows)))
        assert logits is not None
        return self.fit_vocabulary(logits)

    def has_static_steps(self, num_tokens: int) -> bool:
        """Whether :meth:`static_steps` can be had for steps of so many tokens."""
        return self.model.decoder(self.cache, num_tokens) is not None

    def static_steps(self) -> tuple[Decoder, StaticSteps]:
        """The model in two halves, and where its steps of fixed sizes are kept."""
        both = self.model.decoder(self.cache, 1)
        assert both is not None
        return both

    def _readable(self, tokens: list[int]) -> list[int]:
        """A token that only the target's wider embedding has is read as token 0."""
        size = self.model.vocab_size
        if size >= self.vocab_size:
            return tokens
        return [token if token < size else 0 for token in tokens]

    def fit_vocabulary(self, logits: Tensor) -> Tensor:
        """Give logits the target's width: padding entries are never drafted."""
        missing = self.vocab_size - logits.shape[1]
        if missing <= 0:
            return logits[:, : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
