"""The base class of policies that use a trained acceptance head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.errors import InvalidParameterError
from draftwise.estimators.classifier import AcceptanceHead, features
from draftwise.policies.base import DraftPlan, Policy, PolicyContext, Signal
from draftwise.policies.inputs import DraftPosition, RequestState


class LearnedStop(Policy):
    """Stops by a head's estimate of P(accept), computed from the draft's signals."""

    signals = frozenset({Signal.ENTROPY, Signal.TOKEN_PROBABILITY, Signal.POSITION, Signal.HISTORY})
    needs_profile = True

    def __init__(self, context: PolicyContext) -> None:
        """Take the head from the profile.

        Raises:
            InvalidParameterError: the profile has no head for this policy.
        """
        super().__init__(context)
        parameters = {} if context.profile is None else context.profile.parameters
        try:
            self._head = AcceptanceHead.from_tensors(parameters[self.name])
        except KeyError:
            raise InvalidParameterError(
                "profile",
                f"has no head for policy {self.name!r}; create it again with `draftwise profile`",
            ) from None
        self._history: list[float] = []

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """γ for every request."""
        self._history = [request.history for request in requests]
        return super().plan_drafts(requests)

    def p_accept(self, position: DraftPosition) -> Tensor:
        """``[active]`` the head's acceptance estimates of the tokens just drawn."""
        assert position.draft_probs is not None
        assert position.entropy is not None
        assert position.token_probs is not None
        device = position.entropy.device
        self._head = self._head.to(device)
        history = torch.tensor([self._history[at] for at in position.requests], device=device)
        return self._head.predict(
            features(
                position.entropy,
                position.token_probs,
                position.draft_probs.amax(dim=1),
                torch.full_like(position.entropy, position.index),
                history,
            )
        )
