"""The interface of a policy: it sees numbers and returns lengths.

A policy is asked four things in every step, in this order:

1. :meth:`Policy.draft_lengths`: how many tokens to draft at most, for each request.
2. :meth:`Policy.keep_drafting`: after each drafted token, who goes on.
3. :meth:`Policy.select`: which drafted tokens the target verifies, and from which proposals q′.
4. :meth:`Policy.observe`: what became of it.

The output stays the target's as long as a decision about a position uses nothing that was drawn at
or after that position, or else reports the filtered proposal it amounts to (see
:mod:`draftwise.core.rejection`). A position is either cut (q′ = 0) or filtered (q′ = q·keep) by
what precedes it; which of the two must not depend on the token drawn there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from draftwise.core.types import Draft, Outcome, Plan


class RequestState(NamedTuple):
    """What a policy knows of a request before a step.

    Attributes:
        num_tokens: tokens so far, prompt and output.
        num_output_tokens: tokens generated so far.
        draft_limit: most tokens that may be drafted (room in the output and in the contexts);
            0 while the prompt is being processed.
    """

    num_tokens: int
    num_output_tokens: int
    draft_limit: int


@dataclass(frozen=True)
class DraftPosition:
    """The token just drafted, for the requests that are still drafting.

    Attributes:
        index: position in the draft, from 0.
        requests: ``[active]`` int64, index of each request in the step's batch.
        tokens: ``[active]`` int64, the token drawn.
        probs: ``[active, vocab]`` float32, the distribution it was drawn from; ``None`` when
            every request of the step is decoded greedily.
        logits: ``[active, vocab]`` the draft's logits before any processing.
    """

    index: int
    requests: Tensor
    tokens: Tensor
    probs: Tensor | None
    logits: Tensor


class Policy(ABC):
    """Decides when to stop drafting and what to verify.

    Attributes:
        name: what users call it.
        summary: one line for listings.
        source: where the method was published.
        lossless: whether the output keeps exactly the target's distribution.
        needs_draft: whether it uses a draft model at all.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    lossless: ClassVar[bool] = True
    needs_draft: ClassVar[bool] = True

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    @abstractmethod
    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """Most tokens to draft for each request, at most its ``draft_limit``."""

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Who goes on drafting: ``[active]`` bool, or ``None`` for all."""
        return None

    def select(self, draft: Draft) -> Plan:
        """Which drafted tokens to verify; all of them unless a policy says otherwise."""
        return Plan(draft.tokens, draft.lengths, draft.probs)

    def observe(self, outcome: Outcome) -> None:  # noqa: B027
        """Learn from what the target made of the plan."""
