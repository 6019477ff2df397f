"""Policies decide when to stop drafting and what to verify. They do not depend on the engine."""

from draftwise.policies.base import DraftPlan, Policy, PolicyContext, Signal, planned_drafts
from draftwise.policies.catalogue import POLICIES, create_policy, policy_class
from draftwise.policies.inputs import DraftPosition, RequestState

__all__ = [
    "POLICIES",
    "DraftPlan",
    "DraftPosition",
    "Policy",
    "PolicyContext",
    "RequestState",
    "Signal",
    "create_policy",
    "planned_drafts",
    "policy_class",
]
