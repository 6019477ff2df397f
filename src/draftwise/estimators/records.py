"""What was seen of drafted tokens: signals, and what the target thought of them."""

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
    """Drafted tokens, one entry each, chain after chain and in order within a chain.

    A chain is the draft of one request in one step. All arrays are ``[num_tokens]``.

    Attributes:
        chain: number of the token's chain.
        position: position in the draft, from 0.
        entropy: H(q) of the draft's belief, nats.
        token_prob: q(x) of the drawn token.
        top_prob: largest q at the position.
        overlap: S = Σ min(q, c); 0 where no companion judged.
        agreement: A = min(1, c(x)/q(x)); 0 where no companion judged.
        history: the request's mean acceptance before the step.
        acceptance: min(1, p(x)/q(x)), the acceptance probability given that the tokens before it
            were kept.
        accepted: whether plain speculative decoding kept the token.
    """

    chain: Integers
    position: Integers
    entropy: Floats
    token_prob: Floats
    top_prob: Floats
    overlap: Floats
    agreement: Floats
    history: Floats
    acceptance: Floats
    accepted: Booleans

    def __post_init__(self) -> None:
        if len({len(getattr(self, item.name)) for item in fields(self)}) > 1:
            raise ValueError("all columns need the same length")

    def __len__(self) -> int:
        return len(self.chain)

    def reached(self) -> Floats:
        """``[num_tokens]`` probability that the tokens before it in its chain are kept.

        The weight with which a token counts: what is wanted is the acceptance of tokens whose
        predecessors were accepted, and this is that condition without its noise.
        """
        reached = np.ones(len(self), dtype=np.float32)
        for index in range(1, len(self)):
            if self.position[index]:
                reached[index] = reached[index - 1] * self.acceptance[index - 1]
        return reached

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> Records:
        """Some of the tokens."""
        return Records(**{item.name: getattr(self, item.name)[index] for item in fields(self)})

    @classmethod
    def empty(cls) -> Records:
        """No tokens at all."""
        number = np.empty(0, dtype=np.float32)
        integer, boolean = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
        return cls(integer, integer, *(number,) * 6, number, boolean)

    @classmethod
    def join(cls, parts: Sequence[Records]) -> Records:
        """Parts one after another; chains are renumbered so that they stay apart."""
        first = np.cumsum([0, *(int(part.chain.max(initial=-1)) + 1 for part in parts)])
        columns = {
            item.name: np.concatenate([getattr(part, item.name) for part in parts])
            for item in fields(cls)
        }
        columns["chain"] = np.concatenate(
            [part.chain + start for part, start in zip(parts, first, strict=False)]
        )
        return cls(**columns)
