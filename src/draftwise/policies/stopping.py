"""What policies share that stop drafting early and verify all they drafted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.policies.base import DraftPosition, Policy, RequestState


class EarlyStop(Policy):
    """Drafts up to γ tokens, stops where a rule says so, and verifies everything drafted.

    The rule is asked after each token (:meth:`Policy.keep_drafting`) and decides about the next
    position. The token it looked at stays in the draft and is verified. So whatever the rule uses,
    it was known before anything was drawn at the position that is cut: a predictable cut, lossless.
    """

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """γ for everybody, as far as there is room."""
        return [min(self.num_speculative_tokens, request.draft_limit) for request in requests]


class RunningProduct:
    """For each request of a step, the product of a number per drafted token."""

    def __init__(self) -> None:
        self._product = torch.ones(0)

    def begin(self, num_requests: int) -> None:
        """A step begins: 1 for every request."""
        self._product = torch.ones(num_requests)

    def times(self, position: DraftPosition, factor: Tensor) -> Tensor:
        """Multiply those that are still drafting.

        Args:
            position: the token just drafted.
            factor: ``[active]`` float32.

        Returns:
            ``[active]`` the products, this token's factor included.
        """
        self._product = self._product.to(factor.device)
        index = torch.tensor(position.requests, device=factor.device)
        self._product[index] *= factor
        return self._product[index]
