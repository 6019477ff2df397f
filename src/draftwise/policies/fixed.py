"""A fixed draft length. All drafted tokens are verified."""

from __future__ import annotations

from collections.abc import Sequence

from draftwise.policies.base import Policy
from draftwise.policies.inputs import RequestState


class FixedLength(Policy):
    """Draft and verify γ tokens in every step, independent of the load."""

    name = "fixed"
    summary = "always num_speculative_tokens, all verified"
    source = "Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding"
    verifies_trees = True

    def draft_lengths(self, requests: Sequence[RequestState]) -> list[int]:
        """γ for every request, capped by its ``draft_limit``."""
        return [min(self.num_speculative_tokens, request.draft_limit) for request in requests]
