"""How the attention scores of a layer are computed from queries and keys."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Scores(NamedTuple):
    """How a layer computes attention scores.

    Attributes:
        scaling: factor of the scores; ``None`` for 1/√key_size.
        softcap: the scores are limited to ±softcap by softcap·tanh(score / softcap); ``None`` for
            no limit (Gemma 2).
        sinks: ``[heads]`` a further score of each head, whose weight is discarded; ``None`` for
            none (gpt-oss).
    """

    scaling: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the scores are the scaled products of queries and keys."""
        return self.softcap is None and self.sinks is None
