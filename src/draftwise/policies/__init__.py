"""Policies: when to stop drafting and what to verify. They know nothing of engines."""

from draftwise.policies.base import DraftPosition, Policy, PolicyContext, RequestState, Signal
from draftwise.policies.registry import POLICIES, create_policy, policy_class

__all__ = [
    "POLICIES",
    "DraftPosition",
    "Policy",
    "PolicyContext",
    "RequestState",
    "Signal",
    "create_policy",
    "policy_class",
]
