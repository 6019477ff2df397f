"""All policies by name. To add a policy, add a file and its class to the tuple below."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.policies.adaedl import AdaEdl
from draftwise.policies.base import Policy, PolicyContext
from draftwise.policies.confidence import Confidence
from draftwise.policies.disco import Disco
from draftwise.policies.dyspec import DySpec
from draftwise.policies.eagle2 import Eagle2, SvipTree
from draftwise.policies.fixed import FixedLength
from draftwise.policies.heuristic import Heuristic
from draftwise.policies.none import NoSpeculation
from draftwise.policies.oracle import Oracle
from draftwise.policies.price import Adaptive
from draftwise.policies.smartspec import SmartSpec
from draftwise.policies.specdec_plus_plus import SpecDecPlusPlus
from draftwise.policies.staged import Staged
from draftwise.policies.sv import SpeculativeVerification
from draftwise.policies.sv_predictable import PredictableVerification
from draftwise.policies.sv_published import PublishedVerification
from draftwise.policies.svip import Svip
from draftwise.policies.tetris import Tetris
from draftwise.policies.tetris_published import TetrisPublished
from draftwise.values import refuse_unknown_keys

_ALL: tuple[type[Policy], ...] = (
    NoSpeculation,
    FixedLength,
    Heuristic,
    Svip,
    AdaEdl,
    Confidence,
    Disco,
    SpecDecPlusPlus,
    DySpec,
    Eagle2,
    SvipTree,
    SmartSpec,
    Tetris,
    TetrisPublished,
    Staged,
    Adaptive,
    SpeculativeVerification,
    PredictableVerification,
    PublishedVerification,
    Oracle,
)

POLICIES: Mapping[str, type[Policy]] = MappingProxyType({policy.name: policy for policy in _ALL})


def policy_class(name: str) -> type[Policy]:
    """Look up a policy class by name.

    Raises:
        InvalidParameterError: there is no such policy. The error suggests or lists existing ones.
    """
    if name in POLICIES:
        return POLICIES[name]
    near = difflib.get_close_matches(name, POLICIES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"policies are {', '.join(POLICIES)}"
    raise InvalidParameterError("policy", f"unknown policy {name!r}; {hint}")


def options_of(policy: type[Policy]) -> dict[str, Any]:
    """The options of a policy and their default values."""
    parameters = inspect.signature(policy).parameters
    return {key: each.default for key, each in parameters.items() if key != "context"}


def create_policy(name: str, context: PolicyContext, options: Mapping[str, Any]) -> Policy:
    """Create a policy with its options.

    Raises:
        InvalidParameterError: the policy or an option is unknown, an option is out of range, or a
            requirement of the policy is missing.
    """
    policy = policy_class(name)
    refuse_unknown_keys("policy_options", options, options_of(policy))
    check_needs(policy, context)
    return policy(context, **options)


def check_needs(policy: type[Policy], context: PolicyContext) -> None:
    """Check that the requirements of a policy are met.

    Raises:
        InvalidParameterError: a requirement is not met; the error names it.
    """
    name = policy.name
    if policy.needs_companion and not context.has_companion:
        raise InvalidParameterError("companion", f"missing: policy {name!r} needs a companion")
    if policy.needs_draft and not context.has_draft:
        raise InvalidParameterError("draft", f"missing: policy {name!r} needs a draft model")
    if context.drafts_trees and policy.needs_draft and not policy.verifies_trees:
        raise InvalidParameterError(
            "tree_width",
            f"policy {name!r} verifies chains only; set it to 1, or use the policy 'eagle2'",
        )
    if policy.uses_target_oracle and not context.for_studies:
        raise InvalidParameterError(
            "policy", f"{name!r} is for studies only; start the engine with it"
        )
    if policy.needs_latency and context.latency is None:
        raise InvalidParameterError(
            "latency_profile",
            f"missing: policy {name!r} needs step costs; give a latency profile or start the "
            "engine with such a policy",
        )
    if policy.needs_profile and context.profile is None:
        raise InvalidParameterError(
            "profile", f"missing: policy {name!r} needs one; create it with `draftwise profile`"
        )


def check_companion_is_asked(policy: type[Policy]) -> None:
    """Reject a companion that the policy does not use.

    Raises:
        InvalidParameterError: the policy does not use one; lists the policies that do.
    """

    def asks(each: type[Policy]) -> bool:
        return each.needs_draft and each.uses_companion() and not each.uses_target_oracle

    if not asks(policy):
        others = ", ".join(name for name, each in POLICIES.items() if asks(each))
        raise InvalidParameterError(
            "companion",
            f"is not used by policy {policy.name!r}; leave it out or choose one of: {others}",
        )
