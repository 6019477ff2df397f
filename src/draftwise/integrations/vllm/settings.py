"""What ``--additional-config '{"draftwise": {…}}'`` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.params import refuse_unknown_keys
from draftwise.policies import Policy, policy_class
from draftwise.policies.registry import options_of

KEY = "draftwise"


@dataclass(frozen=True)
class VllmSettings:
    """How Draftwise steers vLLM's ``draft_model``.

    Attributes:
        policy: name of a policy; ``None`` for ``sv`` with a companion and ``adaptive`` without,
            and for ``sv-predictable`` where drafts are sampled.
        policy_options: of the policy.
        companion: folder or hub id of the model that judges drafts.
        profile: file of ``draftwise profile`` for the three models.
        latency_profile: file of ``draftwise profile-latency``; step times are followed anyway.

    Raises:
        InvalidParameterError: a key or a value that cannot be; names it.
    """

    policy: str | None = None
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    companion: str | None = None
    profile: str | None = None
    latency_profile: str | None = None

    def __post_init__(self) -> None:
        for name in ("policy", "companion", "profile", "latency_profile"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidParameterError(f"{KEY}.{name}", f"must be a string, got {value!r}")
        if not isinstance(self.policy_options, Mapping):
            raise InvalidParameterError(
                f"{KEY}.policy_options", f"must be a mapping, got {self.policy_options!r}"
            )
        if self.policy is not None:
            known = options_of(policy_class(self.policy))
            refuse_unknown_keys(f"{KEY}.policy_options", self.policy_options, known)
        elif self.policy_options:
            raise InvalidParameterError(f"{KEY}.policy_options", "needs a policy by name")

    @classmethod
    def of(cls, additional_config: object) -> VllmSettings:
        """From vLLM's ``additional_config``; without an entry of ours all is as by default.

        Raises:
            InvalidParameterError: a key or a value that cannot be; names it.
        """
        values = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(values, Mapping):
            raise InvalidParameterError(KEY, f"must be a mapping, got {values!r}")
        refuse_unknown_keys(KEY, values, (item.name for item in fields(cls)))
        return cls(**values)

    def policy_for(self, samples_drafts: bool) -> type[Policy]:
        """The policy that will steer.

        vLLM draws the token after the verified ones from p, or from max(p − q, 0) where one was
        rejected, and knows nothing of filtered proposals. With drafts that are argmaxes any rule
        keeps the target's distribution, as the token drawn says nothing that the position does not;
        with sampled drafts only cuts do that do not look at the token they cut.

        Args:
            samples_drafts: whether drafts are sampled (``draft_sample_method`` probabilistic).

        Raises:
            InvalidParameterError: there is no such policy, or it would not be lossless there.
        """
        if self.policy is None:
            if samples_drafts:
                return policy_class("sv-predictable")
            return policy_class("adaptive" if self.companion is None else "sv")
        policy = policy_class(self.policy)
        why = None
        if policy.judged_by_target:
            why = "asks the target while it drafts, for studies"
        elif policy.replaces_tokens:
            why = "puts tokens of its own in the place of drafted ones"
        elif samples_drafts and not (policy.lossless and not policy.filters):
            why = (
                "looks at the tokens it leaves out, which is lossless with greedy drafts only; "
                'leave out "draft_sample_method" of the speculative config, or take sv-predictable'
            )
        if why is not None:
            raise InvalidParameterError(f"{KEY}.policy", f"{self.policy!r} {why}")
        return policy
