"""A fixed draft length. All drafted tokens are verified."""

from __future__ import annotations

from draftwise.policies.base import Policy


class FixedLength(Policy):
    """Draft and verify γ tokens in every step, independent of the load."""

    name = "fixed"
    summary = "always num_speculative_tokens, all verified"
    source = "Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding"
    verifies_trees = True
