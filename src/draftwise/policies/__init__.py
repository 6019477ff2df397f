"""Policies decide when to stop drafting and what to verify. They do not depend on the engine."""

from draftwise.policies.base import Policy, PolicyContext, Signal
from draftwise.policies.inputs import DraftPosition, RequestState
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
