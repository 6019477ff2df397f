"""The base class of policies that stop drafting early and verify all drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.policies.base import Policy
from draftwise.policies.inputs import DraftPosition, RequestState


class EarlyStop(Policy):
    """Drafts up to γ tokens, stops where its rule decides so, and verifies everything drafted.

    The rule runs after each token (:meth:`Policy.keep_drafting`) and decides about the next
    position. The token just drawn stays in the draft and is verified. So the rule only uses
    information known before anything is drawn at the position that it cuts. Such a cut is
    predictable, and therefore lossless.
    """

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """γ for every request, capped by its ``draft_limit``."""
        return [min(self.num_speculative_tokens, request.draft_limit) for request in requests]


class RunningProduct:
    """The running product of one factor per drafted token, for each request of a step."""

    def __init__(self) -> None:
        self._product = torch.ones(0)

    def begin(self, num_requests: int) -> None:
        """Start a step: set every product to 1."""
        self._product = torch.ones(num_requests)

    def times(self, position: DraftPosition, factor: Tensor) -> Tensor:
        """Multiply the products of the active requests.

        Args:
            position: the token just drafted.
            factor: ``[active]`` float32.

        Returns:
            ``[active]`` the products, including this token's factor.
        """
        self._product = self._product.to(factor.device)
        index = torch.tensor(position.requests, device=factor.device)
        self._product[index] *= factor
        return self._product[index]
