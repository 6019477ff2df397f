"""The settings in ``--additional-config '{"draftwise": {…}}'``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from draftwise.core.formats import MODEL_FREE_DRAFTS
from draftwise.errors import InvalidParameterError
from draftwise.policies import Policy, policy_class
from draftwise.policies.catalogue import check_companion_is_asked, options_of
from draftwise.values import refuse_unknown_keys

KEY = "draftwise"
# vLLM's method for drafts from the text, on both model runners.
TEXT_METHOD = "ngram"


@dataclass(frozen=True)
class VllmSettings:
    """How Draftwise controls vLLM's speculation.

    Attributes:
        draft: ``"suffix"`` or ``"ngram"``, which continue the requests' own texts. With a draft
            model, ``"suffix"`` lets the policy choose between both for each request. The default
            ``None`` means ``suffix`` with vLLM's method ``ngram``, and vLLM's draft model alone
            otherwise.
        policy: name of a policy. The default ``None`` means ``adaptive`` without a companion, and
            with one ``sv-predictable`` where drafts are sampled, otherwise ``sv``.
        policy_options: options of the policy.
        companion: folder or hub id of the model that scores drafts.
        profile: file of ``draftwise profile`` for the three models.
        latency_profile: file of ``draftwise profile-latency``. Costs are still updated from the
            times of steps.
        guard: whether drafts are shortened so that they cost at most one step, and one per cent of
            the time, compared with no speculation.

    Raises:
        InvalidParameterError: an unknown key or an invalid value.
    """

    draft: str | None = None
    policy: str | None = None
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    companion: str | None = None
    profile: str | None = None
    latency_profile: str | None = None
    guard: bool = True

    def __post_init__(self) -> None:
        for name in ("draft", "policy", "companion", "profile", "latency_profile"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidParameterError(f"{KEY}.{name}", f"must be a string, got {value!r}")
        if self.draft is not None and self.draft not in MODEL_FREE_DRAFTS:
            raise InvalidParameterError(
                f"{KEY}.draft",
                f"must be {' or '.join(MODEL_FREE_DRAFTS)}, got {self.draft!r}; a draft model is "
                "the model of vLLM's speculative config",
            )
        if not isinstance(self.guard, bool):
            raise InvalidParameterError(
                f"{KEY}.guard", f"must be true or false, got {self.guard!r}"
            )
        if not isinstance(self.policy_options, Mapping):
            raise InvalidParameterError(
                f"{KEY}.policy_options", f"must be a mapping, got {self.policy_options!r}"
            )
        if self.policy is not None:
            known = options_of(policy_class(self.policy))
            refuse_unknown_keys(f"{KEY}.policy_options", self.policy_options, known)
        elif self.policy_options:
            raise InvalidParameterError(
                f"{KEY}.policy_options", "can only be set together with policy"
            )

    @classmethod
    def of(cls, additional_config: object) -> VllmSettings:
        """Read the settings from vLLM's ``additional_config``; defaults where there are none.

        Raises:
            InvalidParameterError: an unknown key or an invalid value.
        """
        values = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(values, Mapping):
            raise InvalidParameterError(KEY, f"must be a mapping, got {values!r}")
        refuse_unknown_keys(KEY, values, (item.name for item in fields(cls)))
        return cls(**values)

    def text_draft(self, method: str) -> str | None:
        """The name of the proposer that continues texts; ``None`` if a draft model alone drafts.

        Args:
            method: method of vLLM's speculative config, ``"draft_model"`` or ``"ngram"``.

        Raises:
            InvalidParameterError: a setting cannot be combined with the method.
        """
        if method == "draft_model":
            if self.draft == "ngram":
                raise InvalidParameterError(
                    f"{KEY}.draft",
                    "'ngram' has no estimates to compare with a draft model; use suffix, or set "
                    f"the method of the speculative config to {TEXT_METHOD}",
                )
            if self.draft is not None and self.companion is not None:
                raise InvalidParameterError(
                    f"{KEY}.companion",
                    "does not score drafts beside 'suffix'; remove one of both",
                )
            return self.draft
        for name, why in (
            ("companion", "scores the drafts of a draft model"),
            ("profile", "has the acceptance statistics of a draft model"),
        ):
            if getattr(self, name) is not None:
                raise InvalidParameterError(
                    f"{KEY}.{name}", f"{why}; remove it, or use a draft model"
                )
        return self.draft or "suffix"

    def check_sampling(self, samples_drafts: bool) -> None:
        """Refuse sampled drafts of a model beside continuations.

        vLLM verifies all drafts of a step as sampled, or all as certain.

        Raises:
            InvalidParameterError: both are wanted.
        """
        if samples_drafts and self.draft is not None:
            raise InvalidParameterError(
                f"{KEY}.draft",
                f"{self.draft!r} needs greedy drafts of the model beside it; remove "
                '"draft_sample_method" from the speculative config',
            )

    def policy_for(self, samples_drafts: bool) -> type[Policy]:
        """The policy class to use.

        vLLM draws the token after the verified ones from p, or from max(p − q, 0) after a
        rejection, with the unfiltered proposal q. With greedy drafts, any rule of selection keeps
        the target's distribution, because the drafted token is determined by its position. The same
        holds for continuations of texts, which are proposed with certainty. With
        sampled drafts, only rules that drop a token independently of its id do.

        Args:
            samples_drafts: whether drafts are sampled (``draft_sample_method`` probabilistic).

        Raises:
            InvalidParameterError: the policy does not exist, would not be lossless in vLLM, or
                does not use the companion.
        """
        policy = self._lossless_policy(samples_drafts)
        if self.companion is not None:
            try:
                check_companion_is_asked(policy)
            except InvalidParameterError as error:
                raise InvalidParameterError(f"{KEY}.companion", error.message) from None
        return policy

    def _lossless_policy(self, samples_drafts: bool) -> type[Policy]:
        if self.policy is None:
            if self.companion is None:
                return policy_class("adaptive")
            return policy_class("sv-predictable" if samples_drafts else "sv")
        policy = policy_class(self.policy)
        reason = None
        if policy.uses_target_oracle:
            reason = "reads the target's probabilities while drafting and is for studies only"
        elif policy.replaces_tokens:
            reason = "replaces drafted tokens, which vLLM does not support"
        elif samples_drafts and not (policy.lossless and not policy.filters):
            reason = (
                "looks at the tokens that it drops, which is lossless with greedy drafts only; "
                'leave out --sample-drafts ("draft_sample_method" in the speculative config), or '
                "use sv-predictable"
            )
        if reason is not None:
            raise InvalidParameterError(f"{KEY}.policy", f"{self.policy!r} {reason}")
        return policy
