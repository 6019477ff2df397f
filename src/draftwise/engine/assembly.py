"""What an engine is put together from: models, sizes, and the parts that work on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from draftwise.core.latency import LatencyModel
from draftwise.engine.drafting import DraftSource, ModelDraft, NoDraft
from draftwise.engine.follower import Follower
from draftwise.engine.judging import Companion
from draftwise.engine.oracle import TargetOracle
from draftwise.engine.overlap import Overlap, OverlapOptions
from draftwise.engine.side import Side
from draftwise.errors import InvalidParameterError
from draftwise.estimators.profile import AcceptanceProfile
from draftwise.models.kv_cache import KVCache
from draftwise.models.loading import LoadedModel
from draftwise.params import SpeculationConfig
from draftwise.policies import Policy, PolicyContext, create_policy
from draftwise.policies.mixture import Mixture

if TYPE_CHECKING:
    from draftwise.engine.replicas.processes import Replicas


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine.

    Attributes:
        max_batch_size: requests that run at once.
        max_chunk_tokens: prompt tokens processed per step, over all requests.
        cache_bytes: memory for the keys and values of all models; ``None`` for no limit.
        overlap: draft for one half of the batch while the target verifies the other; ``None``
            never.
    """

    max_batch_size: int = 32
    max_chunk_tokens: int = 512
    cache_bytes: int | None = None
    overlap: OverlapOptions | None = None


@dataclass(frozen=True)
class Models:
    """The models of an engine.

    Attributes:
        target: the model whose distribution is kept.
        draft: the model that writes ahead; with the target's vocabulary.
        companion: the model that judges the draft; with the target's vocabulary.
    """

    target: LoadedModel
    draft: LoadedModel | None = None
    companion: LoadedModel | None = None


@dataclass(frozen=True)
class Parts:
    """What works on the models.

    Attributes:
        caches: of all models, the target's first.
        sides: decide, draft and judge; two where halves of the batch overlap.
        overlap: decides whether they do, and does it; ``None`` for never.
        oracle: the target, asked while it is drafted; for studies.
    """

    caches: list[KVCache]
    sides: list[Side]
    overlap: Overlap | None
    oracle: TargetOracle | None


def assemble(
    models: Models,
    speculation: SpeculationConfig,
    options: EngineOptions,
    latency: LatencyModel | None = None,
    profile: AcceptanceProfile | None = None,
    policy: Policy | None = None,
    replicas: Replicas | None = None,
) -> Parts:
    """Put an engine's parts together; see :class:`draftwise.engine.engine.Engine`.

    Raises:
        InvalidParameterError: some of what is asked for cannot be had together.
    """
    target, num_rows = models.target, options.max_batch_size
    vocab_size, device = target.model.vocab_size, target.model.device
    context = PolicyContext(
        speculation.num_speculative_tokens,
        latency,
        profile,
        has_companion=models.companion is not None,
        has_draft=models.draft is not None,
    )
    is_given = policy is not None
    first = _make_policy(speculation, context) if policy is None else policy
    caches = [target.model.new_cache(num_rows, target.max_model_len)]

    def follower(model: LoadedModel) -> Follower:
        cache = model.model.new_cache(num_rows, model.max_model_len)
        caches.append(cache)
        return Follower(model.model, cache, vocab_size)

    oracle = TargetOracle(follower(target)) if first.judged_by_target else None
    draft = companion = None
    if models.draft is not None and first.needs_draft:
        draft = follower(models.draft)
    if models.companion is not None and first.uses_companion():
        companion = follower(models.companion)
    # What later policies find here is what was set up for the first one.
    context = replace(context, has_draft=draft is not None, has_companion=companion is not None)

    def side(own: Policy) -> Side:
        policies = Mixture(context, own)
        if draft is None:
            drafter: DraftSource = NoDraft(device)
        elif replicas is not None:
            # Not every PyTorch can speak to other processes.
            from draftwise.engine.replicas.drafting import in_shares

            return Side(policies, *in_shares(replicas, draft, companion, vocab_size))
        else:
            drafter = ModelDraft(draft, vocab_size, oracle)
        judge = None if companion is None else Companion(companion, vocab_size)
        return Side(policies, drafter, judge, oracle)

    if replicas is not None and first.judged_by_target:
        raise InvalidParameterError(
            "draft_replicas", f"policy {first.name!r} asks the target while it drafts"
        )
    sides = [side(first)]
    overlap = None
    if options.overlap is not None and draft is not None:
        _check_overlap(first, is_given, replicas is not None, device)
        sides.append(side(_make_policy(speculation, context)))
        overlap = Overlap(latency, options.overlap.interference)
    return Parts(caches, sides, overlap, oracle)


def _make_policy(speculation: SpeculationConfig, context: PolicyContext) -> Policy:
    return create_policy(
        speculation.policy_name,
        replace(context, for_studies=True),
        speculation.policy_options,
    )


def _check_overlap(
    policy: Policy, is_given: bool, has_replicas: bool, device: torch.device
) -> None:
    """Refuse what cannot be done in two halves.

    Raises:
        InvalidParameterError: why not.
    """
    why = None
    if device.type != "cpu":
        why = f"is for models on the CPU so far, not on {device.type!r}"
    elif policy.judged_by_target:
        why = f"leaves no target to policy {policy.name!r}, which asks it while drafting"
    elif has_replicas:
        why = "cannot be had together with draft_replicas"
    elif is_given:
        why = "needs a policy for each half; name it instead of giving one that is made"
    if why is not None:
        raise InvalidParameterError("overlap", why)
