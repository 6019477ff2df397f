"""A running product over the tokens of a draft, for policies that stop by it."""

from __future__ import annotations

import torch
from torch import Tensor

from draftwise.policies.inputs import DraftPosition


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
