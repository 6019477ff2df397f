"""A head that computes all positions of a draft in one pass, with its own key-value cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from draftwise.engine.cached_draft_head import CachedDraftHead
from draftwise.engine.cached_model import ForwardInput
from draftwise.models.heads.draft_head import DraftHead
from draftwise.models.kv_cache import KVCache
from draftwise.models.memory import upload


class Predicted:
    """The logits of all drafts of a step, of which one position after the other is drawn.

    Attributes:
        logits: ``[rows, draft_vocab]``. The positions of a draft are in consecutive rows.
        first_rows: the row of each cache slot's first position.
        anchors: ``[drafts]`` int64 token before each draft, in the order of ``first_rows``.
        position: the next position.
    """

    def __init__(self, logits: Tensor, first_rows: Mapping[int, int], anchors: Tensor) -> None:
        """Begin before the first position."""
        self.logits, self.first_rows, self.anchors = logits, first_rows, anchors
        self.position = 0

    def rows(self, slots: Sequence[int]) -> Tensor:
        """``[slots]`` int64, the row of the next position of each cache slot's draft."""
        rows = [self.first_rows[slot] + self.position for slot in slots]
        return upload(rows, torch.long, self.logits.device)


class OnePassHead(CachedDraftHead):
    """Runs a head that predicts several tokens in one pass. They are drawn from left to right."""

    def __init__(self, model: DraftHead, cache: KVCache, vocab_size: int) -> None:
        """Set up.

        Args:
            model: the head.
            cache: its cache, with the same slots as the target's.
            vocab_size: the target's vocabulary size.
        """
        super().__init__(model, cache, vocab_size)
        self.own_vocab_size = model.vocab_size
        self._num_wanted = 1
        self._predicted: Predicted | None = None

    @property
    def are_independent(self) -> bool:
        """Whether the tokens of a draft are independent of each other."""
        return True

    @property
    def estimates_confidence(self) -> bool:
        """Whether the acceptance of each token is estimated before it is drawn."""
        return False

    def expect(self, num_tokens: int) -> None:
        """Prepare the next pass, after which at most so many positions are drawn."""
        self._num_wanted = num_tokens

    def predict(self, inputs: Iterable[ForwardInput]) -> tuple[Predicted | None, int]:
        """Read waiting states, and compute the drafts of the requests that draft, in one pass.

        Args:
            inputs: what is read; see :meth:`draftwise.engine.cached_model.CachedModel.read`.

        Returns:
            What was predicted, ``None`` if no request drafts, and the number of rows of the pass.
        """
        raise NotImplementedError

    def next_rows(self, slots: Sequence[int], tokens: Tensor) -> Tensor:
        """Go on to the next position of some drafts.

        Args:
            slots: cache slots.
            tokens: ``[slots]`` int64, the token before. The logits of the position are written
                again if they depend on it.

        Returns:
            ``[slots]`` int64, the rows with the logits of the position.
        """
        predicted = self._predicted
        assert predicted is not None
        rows = predicted.rows(slots)
        predicted.position += 1
        return rows

    def next_confidence(self, slots: Sequence[int], tokens: Tensor) -> Tensor | None:
        """``[slots]`` the estimated probability that the next token of each draft is accepted.

        Args:
            slots: cache slots.
            tokens: ``[slots]`` int64, the token before.

        Returns:
            ``None`` without a confidence head, and at the end of the drafts.
        """
        return None

    def confidence(self, slots: Sequence[int], num_tokens: int) -> Tensor | None:
        """``[slots, num_tokens]`` what was estimated of the first tokens of each draft."""
        return None

    def read(self, inputs: Iterable[ForwardInput]) -> tuple[Tensor | None, int]:
        """Read as :meth:`predict` does. The logits are those of each draft's first position.

        See :meth:`draftwise.engine.cached_model.CachedModel.read`.
        """
        predicted, num_tokens = self.predict(inputs)
        if predicted is None:
            return None, num_tokens
        return self.read_one(list(predicted.first_rows), predicted.anchors), num_tokens

    def read_one(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Logits ``[rows, vocab]`` of the next position of the drafts. Nothing is read for them."""
        chosen = self.next_rows(rows, tokens)
        assert self._predicted is not None
        return self.fit_vocabulary(self._predicted.logits[chosen])

    def has_static_steps(self, num_tokens: int) -> bool:
        """False: the passes are not recorded."""
        return False
