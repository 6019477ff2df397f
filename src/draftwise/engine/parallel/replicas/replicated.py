"""A draft and a companion that run in several processes, each for a share of every batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch

from draftwise.core.types import CompanionScores, Draft
from draftwise.engine.assembly import Assembly, Models
from draftwise.engine.batch import Batch
from draftwise.engine.companion import CompanionModel
from draftwise.engine.drafting.loop import DraftingStep, run_drafting
from draftwise.engine.parallel.replicas.messages import (
    DraftShare,
    ModelSpec,
    ReplicaSpec,
)
from draftwise.engine.parallel.replicas.processes import Replicas, Shares
from draftwise.engine.parallel.replicas.replica import PrecomputedPolicy
from draftwise.engine.proposers.base import ProposerContext
from draftwise.engine.proposers.model import ModelProposer
from draftwise.engine.request import Request
from draftwise.engine.step import SpeculationPipeline
from draftwise.errors import EngineError, InvalidParameterError
from draftwise.models.draft_buffers import DraftBuffers
from draftwise.models.heads.draft_head import DraftHead
from draftwise.policies import policy_class
from draftwise.policies.base import Policy, planned_drafts
from draftwise.policies.inputs import DraftPosition
from draftwise.speculation import SpeculationConfig


def check_replicas(models: Models, speculation: SpeculationConfig) -> None:
    """Raise an error for what replicas cannot draft.

    Raises:
        InvalidParameterError: names ``draft_replicas``, or ``tree_width`` above 1.
    """
    policy, draft = policy_class(speculation.policy_name), models.draft
    why = None
    if len(speculation.draft_names) > 1:
        why = "cannot be combined with several drafts; name the model only"
    elif models.have_exit or (draft is not None and isinstance(draft.model, DraftHead)):
        why = "needs a draft model, as heads and exits use the target's states"
    elif any(m is not None and m.translator is not None for m in (draft, models.companion)):
        why = "needs a draft and a companion with the target's vocabulary"
    elif policy.uses_target_oracle:
        why = f"policy {policy.name!r} uses the target while it drafts"
    if why is not None:
        raise InvalidParameterError("draft_replicas", why)
    if speculation.tree_width > 1:
        raise InvalidParameterError("tree_width", "replicas draft chains only; set it to 1")


def start_replicas(count: int, models: Models, max_batch_size: int) -> Replicas:
    """Start a process for each replica except the first, which is the engine's own draft.

    Args:
        count: number of replicas, at least 2.
        models: the engine's models, with a draft model.
        max_batch_size: requests that run at once.

    Raises:
        DraftwiseError: a replica cannot load a model, or loads a different one.
    """
    small = {"draft": models.draft, "companion": models.companion}
    loaded = {role: each for role, each in small.items() if each is not None}
    specs = {role: ModelSpec.of(each, role) for role, each in loaded.items()}
    device = models.target.model.device.type
    replicas = [
        ReplicaSpec(
            specs["draft"],
            specs.get("companion"),
            device if device == "cpu" else f"{device}:{rank}",
            max_batch_size,
            models.target.model.vocab_size,
            max(1, torch.get_num_threads() // count),
        )
        for rank in range(1, count)
    ]
    return Replicas(replicas, [each.fingerprint for each in loaded.values()])


def replicated_pipelines(replicas: Replicas, parts: Assembly) -> list[SpeculationPipeline]:
    """Create the pipeline of an engine that drafts and scores in all processes."""
    assert parts.draft_model is not None
    shares = Shares(replicas, parts.draft_model, parts.companion_model)
    context = parts.proposer_context()
    companion = None
    if parts.companion_model is not None:
        companion = ReplicatedCompanion(shares, context.vocab_size)
    proposer = ReplicatedProposer(context, shares)
    return [SpeculationPipeline(parts.policies(), proposer, companion)]


class ReplicatedProposer(ModelProposer):
    """Divides drafting between the engine's own draft model and its replicas.

    Nothing is drafted for requests with a grammar or ``min_tokens``, because replicas do not know
    which tokens are allowed next.
    """

    def __init__(self, context: ProposerContext, shares: Shares) -> None:
        """Set up.

        Args:
            context: the context, with the engine's own draft model.
            shares: divides batches among the replicas.
        """
        super().__init__(context)
        self._shares = shares
        self._backend = ReplicaBackend(shares, self)

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Draft as many tokens as the policy wants, up to each request's limit."""
        limits = self.draft_limits(batch, policy)
        context = self.context
        step = DraftingStep(
            batch, limits, policy.uses_draft_signals, context.vocab_size, context.device
        )
        if not step.active:
            self._backend.begin(step)
            return Draft.empty(len(limits), context.device)
        return run_drafting(self._backend, step, policy)

    def draft_limits(self, batch: Batch, policy: Policy) -> list[int]:
        """As in :class:`Proposer`, but 0 for masked requests."""
        states = [
            state._replace(draft_limit=0) if request.is_masked else state
            for state, request in zip(batch.states(self.room), batch.generating, strict=True)
        ]
        return list(planned_drafts(policy, states).lengths)

    def recover(self, requests: Iterable[Request]) -> None:
        """Raise an error: replicas cannot return to an earlier state while answers are pending.

        Raises:
            EngineError: always.
        """
        raise EngineError("engine", "a step with replicas failed; start the engine again")

    def close(self) -> None:
        """End the replicas' processes."""
        self._shares.replicas.close()


class ReplicaBackend:
    """Draws complete drafts in all processes at once.

    The drafting loop asks the policy about each position afterwards.
    """

    def __init__(self, shares: Shares, own: ModelProposer) -> None:
        """Set up.

        Args:
            shares: divides batches among the replicas.
            own: proposer for the engine's own share.
        """
        self._shares, self._own = shares, own
        model = shares.draft
        self._model = model
        self._buffers = DraftBuffers(0, 0, 0)
        self._lengths: list[int] = []
        self._width = 0

    def serves(self, step: DraftingStep) -> bool:
        """Whether no request that drafts is masked."""
        return not step.is_masked

    def begin(self, step: DraftingStep) -> None:
        """Draft in all processes."""
        self._step = step
        shares = self._shares.of(step.batch)
        orders = {rank: self._order(*share) for rank, share in enumerate(shares) if rank}
        busy = {rank: order for rank, order in orders.items() if order is not None}
        drafts = self._shares.exchange(busy, self._model, partial(self._draft_own, *shares[0]))
        self._width = max(draft.tokens.shape[1] for draft in drafts.values())
        if not self._buffers.fits(len(step.limits), max(1, self._width)):
            model = self._model
            self._buffers = DraftBuffers(
                model.num_rows, max(step.longest, self._width), model.vocab_size, model.device
            )
        self._lengths = [0] * len(step.limits)
        for rank, draft in drafts.items():
            own = shares[rank][0]
            for index, length in zip(own, draft.lengths, strict=True):
                self._lengths[index] = length
            if any(draft.lengths):
                self._buffers.put(own, draft, step.own_draft_probs)

    def draw(self, active: list[int], num_tokens: int) -> int:
        """Nothing to draw: :meth:`begin` drew all tokens."""
        return max(1, self._width)

    def decided_lengths(self) -> dict[int, int]:
        """None."""
        return {}

    def position(self, index: int, active: list[int]) -> tuple[DraftPosition, list[bool]]:
        """A drawn position."""
        is_nan = [self._lengths[request] <= index for request in active]
        return self._step.position(self._buffers, index, active), is_nan

    def finish(self, lengths: list[int], num_tokens: int) -> Draft:
        """The draft, truncated to each request's length."""
        return self._step.collect(self._buffers, lengths, min(num_tokens, self._width))

    def _draft_own(self, own: list[int], part: Batch) -> Draft:
        """Draft for the engine's own share, as a replica would."""
        step = self._step
        limits = [step.limits[index] for index in own]
        return self._own.draft(part, PrecomputedPolicy(limits, step.signals), limits)

    def _order(self, own: list[int], part: Batch) -> DraftShare | None:
        """The message for a replica; ``None`` if its share has no work."""
        step = self._step
        limits = [step.limits[index] for index in own]
        if not part.chunks and not any(limits):
            return None
        return DraftShare(
            self._shares.changes(part),
            [(chunk.request.cache_slot, chunk.start, chunk.end) for chunk in part.chunks],
            [request.cache_slot for request in part.generating],
            limits,
            part.controls,
            part.token_history,
            part.uniforms,
            step.signals,
        )


class ReplicatedCompanion(CompanionModel):
    """Divides scoring between the engine's own companion and its replicas."""

    def __init__(self, shares: Shares, vocab_size: int) -> None:
        """Set up."""
        assert shares.companion is not None
        super().__init__(shares.companion, vocab_size)
        self._shares = shares

    def read_prompts(self, batch: Batch) -> None:
        """Read the prompt chunks of a step whose draft is not scored."""
        if not batch.chunks:
            return
        part, orders = self._divided(batch, (0,) * len(batch.generating))
        self._shares.exchange(orders, self._cached_model, partial(super().read_prompts, part))

    def score(self, batch: Batch, draft: Draft) -> CompanionScores:
        """Score each drafted position.

        Args:
            batch: the step's batch.
            draft: the draft, with its signals.
        """
        assert draft.signals is not None
        shares = self._shares.of(batch)
        part, orders = self._divided(batch, draft.lengths)
        score = partial(super().score, part, _part_of_draft(draft, shares[0][0]))
        results = self._shares.exchange(orders, self._cached_model, score)
        signals, device = draft.signals, draft.tokens.device
        whole = CompanionScores(
            torch.zeros_like(signals.draft_probs),
            torch.zeros_like(signals.entropy),
            torch.zeros_like(signals.entropy),
        )
        for rank, scores in results.items():
            if scores is None:
                continue
            for name, values in vars(scores).items():
                getattr(whole, name)[shares[rank][0], : values.shape[1]] = values.to(device)
        return whole

    def _divided(
        self, batch: Batch, lengths: Sequence[int]
    ) -> tuple[Batch, dict[int, tuple[int, ...]]]:
        """The engine's part, and the draft lengths of each replica that has drafts or prompts."""
        shares, orders = self._shares.of(batch), {}
        for rank, (own, part) in enumerate(shares[1:], 1):
            own_lengths = tuple(lengths[index] for index in own)
            if part.chunks or any(own_lengths):
                orders[rank] = own_lengths
        return shares[0][1], orders


def _part_of_draft(draft: Draft, own: list[int]) -> Draft:
    at = torch.tensor(own, dtype=torch.long, device=draft.tokens.device)
    assert draft.signals is not None
    return replace(
        draft,
        tokens=draft.tokens[at],
        lengths=tuple(draft.lengths[index] for index in own),
        probs=None,  # a companion compares its own with those of the signals
        signals=draft.signals.of_requests(at),
        stage_uniforms=None,
    )
