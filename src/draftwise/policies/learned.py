"""What policies share that ask a trained head about each drafted token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.errors import InvalidParameterError
from draftwise.estimators.classifier import AcceptanceHead, features
from draftwise.policies.base import DraftPosition, PolicyContext, RequestState, Signal
from draftwise.policies.stopping import EarlyStop


class LearnedStop(EarlyStop):
    """Stops by a head's estimate of P(accept), from what the draft knows of itself."""

    signals = frozenset({Signal.ENTROPY, Signal.TOKEN_PROBABILITY, Signal.POSITION, Signal.HISTORY})
    needs_profile = True

    def __init__(self, context: PolicyContext) -> None:
        """Take the head from the profile.

        Raises:
            InvalidParameterError: the profile has none for this policy.
        """
        super().__init__(context)
        parameters = {} if context.profile is None else context.profile.parameters
        try:
            self._head = AcceptanceHead.from_tensors(parameters[self.name])
        except KeyError:
            raise InvalidParameterError(
                "profile",
                f"has nothing for policy {self.name!r}; make it anew with `draftwise profile`",
            ) from None
        self._history: list[float] = []

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """γ for everybody, as far as there is room."""
        self._history = [request.history for request in requests]
        return super().draft_lengths(requests)

    def p_accept(self, position: DraftPosition) -> Tensor:
        """``[active]`` what the head thinks of the token just drawn."""
        assert position.beliefs is not None
        assert position.entropy is not None
        assert position.token_probs is not None
        device = position.entropy.device
        self._head = self._head.to(device)
        history = torch.tensor([self._history[at] for at in position.requests], device=device)
        return self._head.predict(
            features(
                position.entropy,
                position.token_probs,
                position.beliefs.amax(dim=1),
                torch.full_like(position.entropy, position.index),
                history,
            )
        )
