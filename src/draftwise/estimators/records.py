"""Records of drafted tokens: their signals and their acceptance by the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class Records:
    """Drafted tokens, one entry per token, ordered by chain and by position within a chain.

    A chain is the draft of one request in one step. All arrays are ``[num_tokens]``.

    Attributes:
        chain: index of the token's chain.
        position: position in the draft, from 0.
        entropy: H(q) in nats, with q at temperature 1 for greedy requests.
        token_prob: q(x) of the drafted token.
        top_prob: largest probability of q at the position.
        overlap: S = Σ min(q, c); 0 without a companion.
        agreement: A = min(1, c(x)/q(x)); 0 without a companion.
        confidence: acceptance probability that the draft's own head estimated before the token was
            drawn; 0 for drafts without such a head.
        history: the request's mean acceptance before the step.
        acceptance: min(1, p(x)/q(x)), the acceptance probability given that the tokens before it
            are accepted.
        accepted: whether plain speculative decoding accepted the token.
    """

    chain: Integers
    position: Integers
    entropy: Floats
    token_prob: Floats
    top_prob: Floats
    overlap: Floats
    agreement: Floats
    confidence: Floats
    history: Floats
    acceptance: Floats
    accepted: Booleans

    def __post_init__(self) -> None:
        if len({len(getattr(self, item.name)) for item in fields(self)}) > 1:
            raise ValueError("all columns need the same length")

    def __len__(self) -> int:
        return len(self.chain)

    def reach_probability(self) -> Floats:
        """``[num_tokens]`` probability that all tokens before this one in its chain are accepted.

        It is the weight of the token in every mean. Means are over tokens whose predecessors were
        accepted, and weighting by this probability has less variance than selecting those tokens.
        """
        reach_probability = np.ones(len(self), dtype=np.float32)
        for index in range(1, len(self)):
            if self.position[index]:
                reach_probability[index] = reach_probability[index - 1] * self.acceptance[index - 1]
        return reach_probability

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> Records:
        """Select tokens by indices or by a mask."""
        return Records(**{item.name: getattr(self, item.name)[index] for item in fields(self)})

    @classmethod
    def empty(cls) -> Records:
        """Records without tokens."""
        number = np.empty(0, dtype=np.float32)
        integer, boolean = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
        return cls(integer, integer, *(number,) * 8, boolean)

    @classmethod
    def join(cls, parts: Sequence[Records]) -> Records:
        """Concatenate records; chains are renumbered so that they remain distinct."""
        first = np.cumsum([0, *(int(part.chain.max(initial=-1)) + 1 for part in parts)])
        columns = {
            item.name: np.concatenate([getattr(part, item.name) for part in parts])
            for item in fields(cls)
        }
        columns["chain"] = np.concatenate(
            [part.chain + start for part, start in zip(parts, first, strict=False)]
        )
        return cls(**columns)
