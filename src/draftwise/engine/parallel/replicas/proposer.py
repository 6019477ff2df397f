"""A draft model that runs in several processes, each for a share of every batch."""

from __future__ import annotations

from collections.abc import Iterable

from draftwise.core.types import Draft
from draftwise.engine.batch import Batch
from draftwise.engine.drafting.loop import DraftingStep, run_drafting
from draftwise.engine.parallel.replicas.messages import Drafted, DraftShare
from draftwise.engine.parallel.replicas.policy import PrecomputedPolicy
from draftwise.engine.parallel.replicas.shares import Shares
from draftwise.engine.proposers.base import ProposerContext
from draftwise.engine.proposers.model import ModelProposer
from draftwise.engine.request import Request
from draftwise.errors import EngineError
from draftwise.models.draft_buffers import DraftBuffers
from draftwise.policies.base import Policy, planned_drafts
from draftwise.policies.inputs import DraftPosition


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
        shares, replicas = self._shares.of(step.batch), self._shares.replicas
        busy = []
        for rank, (own, part) in enumerate(shares[1:], 1):
            order = self._order(own, part)
            if order is not None:
                replicas.send(order, rank)
                busy.append(rank)
        answers = {0: self._draft_own(*shares[0])}
        for rank in busy:
            answer: Drafted = replicas.receive(rank)
            for slot, length in answer.cached.items():
                self._model.cache.lengths[slot] = length
            answers[rank] = answer
        self._width = max(answer.draft.tokens.shape[1] for answer in answers.values())
        if not self._buffers.fits(len(step.limits), max(1, self._width)):
            model = self._model
            self._buffers = DraftBuffers(
                model.num_rows, max(step.longest, self._width), model.vocab_size, model.device
            )
        self._lengths = [0] * len(step.limits)
        for rank, answer in answers.items():
            self._take(shares[rank][0], answer)

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

    def _take(self, own: list[int], answer: Drafted) -> None:
        """Merge one process's draft with the others."""
        draft, step = answer.draft, self._step
        for index, length in zip(own, draft.lengths, strict=True):
            self._lengths[index] = length
        if not any(draft.lengths):
            return
        self._buffers.put(own, draft, step.own_draft_probs)

    def _draft_own(self, own: list[int], part: Batch) -> Drafted:
        """Draft for the engine's own share, as a replica would."""
        step = self._step
        limits = [step.limits[index] for index in own]
        draft = self._own.draft(part, PrecomputedPolicy(limits, step.signals), limits)
        return Drafted(draft, {})

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
