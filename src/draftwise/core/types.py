"""What draft sources, policies and the acceptance law pass to each other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """What the draft source proposed for each request of a step.

    Attributes:
        tokens: ``[batch, num_tokens]`` int64; entries beyond a request's length are 0.
        lengths: number of drafted tokens of each request, ``[batch]`` host integers.
        probs: ``[batch, num_tokens + 1, vocab]`` float32, the draft's distribution q at each
            drafted position, and zeros from a request's length on. ``None`` when every request
            of the step is decoded greedily, where q is not needed.
        parents: index of the token each drafted token follows, -1 for the request's last token.
            A chain is ``(-1, 0, 1, …)``; it is the same for all requests of a step.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    probs: Tensor | None
    parents: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What the target is asked to verify.

    Attributes:
        tokens: ``[batch, num_tokens]`` int64, as in :class:`Draft`.
        lengths: verification length of each request, ``[batch]`` host integers.
        proposals: ``[batch, num_tokens + 1, vocab]`` float32, the sub-distributions q′ with
            0 ≤ q′ ≤ q. Position ``lengths[b]`` holds q′ where no token is verified: zeros after a
            cut that did not look at the token drawn there, q·keep where it did. ``None`` when
            every request is decoded greedily.
    """

    tokens: Tensor
    lengths: tuple[int, ...]
    proposals: Tensor | None


@dataclass(frozen=True)
class Outcome:
    """What the target made of a plan.

    Attributes:
        num_drafted: drafted tokens per request, ``[batch]``.
        num_verified: verified tokens per request, ``[batch]``.
        num_accepted: accepted tokens per request, ``[batch]``.
        next_tokens: the corrected or bonus token of each request, ``[batch]``.
        failed: indices of requests for which the target gave no numbers; their other entries
            mean nothing.
    """

    num_drafted: tuple[int, ...]
    num_verified: tuple[int, ...]
    num_accepted: tuple[int, ...]
    next_tokens: tuple[int, ...]
    failed: frozenset[int] = frozenset()
