"""All policies by name. Adding one is adding a file and its class to the tuple below."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.params import refuse_unknown_keys
from draftwise.policies.base import Policy
from draftwise.policies.fixed import FixedLength
from draftwise.policies.none import NoSpeculation

POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {policy.name: policy for policy in (NoSpeculation, FixedLength)}
)


def policy_class(name: str) -> type[Policy]:
    """Look a policy up.

    Raises:
        InvalidParameterError: there is no such policy; lists those there are.
    """
    if name in POLICIES:
        return POLICIES[name]
    near = difflib.get_close_matches(name, POLICIES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"policies are {', '.join(POLICIES)}"
    raise InvalidParameterError("policy", f"unknown policy {name!r}; {hint}")


def create_policy(name: str, num_speculative_tokens: int, options: Mapping[str, Any]) -> Policy:
    """Make a policy with its options.

    Raises:
        InvalidParameterError: unknown policy, or an option it does not have.
    """
    policy = policy_class(name)
    known = set(inspect.signature(policy).parameters) - {"num_speculative_tokens"}
    refuse_unknown_keys("policy_options", options, known)
    return policy(num_speculative_tokens, **options)
