"""``model``: a smaller language model drafts tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftwise.core.types import Draft
from draftwise.engine.batch import Batch
from draftwise.engine.cached_model import ForwardInput
from draftwise.engine.drafting.eager import EagerBackend
from draftwise.engine.drafting.loop import DraftingBackend, DraftingStep, run_drafting
from draftwise.engine.drafting.native import NativeBackend
from draftwise.engine.drafting.recorded import RecordedBackend
from draftwise.engine.lifecycle import Commit
from draftwise.engine.proposers.base import Proposer, ProposerContext
from draftwise.engine.proposers.by_name import register
from draftwise.engine.proposers.token_trees import TreeDrafting
from draftwise.engine.request import Request
from draftwise.policies.base import Policy


@register
class ModelProposer(Proposer):
    """A draft model that drafts token by token, for all requests of the batch at once.

    It reads prompts in the same chunks as the target, without computing logits.
    """

    name = "model"
    summary = "a smaller language model drafts tokens"
    needs_model = True
    drafts_trees = True
    # Whether the most likely tokens are proposed, with certainty, and otherwise drawn tokens.
    is_certain = False

    def __init__(self, context: ProposerContext) -> None:
        """Set up.

        Args:
            context: the context, with a draft model.
        """
        super().__init__(context)
        assert context.draft_model is not None
        self.cached_model = context.draft_model
        self.state_layers = self.cached_model.state_layers
        self._backends = self._new_backends()
        self._trees: TreeDrafting | None = None
        if context.tree_width > 1:
            self.cached_model.model.compile_for_trees()
            self._trees = TreeDrafting(self.cached_model, context.tree_width)

    def _new_backends(self) -> list[DraftingBackend]:
        """The backends, the fastest first. The last one supports every step."""
        model = self.cached_model
        return [NativeBackend(model), RecordedBackend(model), EagerBackend(model)]

    def room(self, request: Request) -> int:
        """Tokens that fit in the draft model's cache after a request's text."""
        return self.cached_model.room(request)

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Draft as many tokens as the policy wants, up to each request's limit."""
        # Trees know no penalties.
        if self._trees is None or not batch.may_branch or batch.controls.changes_tokens:
            return self.draft(batch, policy, self.draft_limits(batch, policy))
        return self._draft_trees(self._trees, batch, policy)

    def _draft_trees(self, trees: TreeDrafting, batch: Batch, policy: Policy) -> Draft:
        """Draft token trees. The policy chooses their nodes by their estimated acceptance."""
        context, limits = self.context, self.draft_limits(batch, policy)
        drafted = trees.draft(self._step(batch, limits, False), policy)
        found = drafted.proposals.lengths.tolist()
        lengths = [min(pair) for pair in zip(limits, found, strict=True)]
        return drafted.draft(lengths, context, batch.uniforms, policy.uses_draft_signals)

    def num_behind(self, request: Request) -> int:
        """Number of a request's tokens that the model has not read yet, besides the newest."""
        return self.cached_model.num_behind(request)

    def must_read(self, batch: Batch) -> bool:
        """Whether the model has to read something in a step in which it does not draft."""
        overdue = self.cached_model.is_overdue
        return bool(batch.chunks) or any(overdue(request) for request in batch.generating)

    def draft(self, batch: Batch, policy: Policy, limits: list[int], min_width: int = 0) -> Draft:
        """Draft up to given limits, on the fastest backend that supports the step.

        Args:
            batch: the step's batch.
            policy: decides after each token which requests continue.
            limits: ``[batch]`` maximum draft length of each request.
            min_width: minimum number of columns of the draft, for other tokens.

        Returns:
            The draft. The next draft overwrites the memory of its distributions.
        """
        model, context = self.cached_model, self.context
        step = self._step(batch, limits, policy.uses_draft_signals, min_width)
        if context.oracle is not None:
            context.oracle.begin(batch, step.active)
        if not step.active:
            model.read(step.inputs)
            return Draft.empty(len(limits), model.device)
        return run_drafting(self._backend_for(step), step, policy, context.oracle)

    def _step(
        self, batch: Batch, limits: Sequence[int], signals: bool, min_width: int = 0
    ) -> DraftingStep:
        """A step in which the model also reads what it is overdue to read."""
        model, vocab_size = self.cached_model, self.context.vocab_size
        step = DraftingStep(
            batch, limits, signals, vocab_size, model.device, min_width, self.is_certain
        )
        step.inputs += [
            ForwardInput(request, len(request.tokens))
            for request, limit in zip(batch.generating, limits, strict=True)
            if not limit and model.is_overdue(request)
        ]
        return step

    def _backend_for(self, step: DraftingStep) -> DraftingBackend:
        """The first backend that serves a step; the last one serves every step."""
        # A generator that is dropped half-way may swallow a KeyboardInterrupt: no ``next(...)``.
        for backend in self._backends[:-1]:
            if backend.serves(step):
                return backend
        return self._backends[-1]

    def admit(self, request: Request) -> None:
        """Clear the request's cache slot."""
        self.cached_model.admit(request)

    def commit(self, commit: Commit) -> None:
        """Roll the cache back to the accepted tokens."""
        self.cached_model.commit(commit)
        if self._trees is not None:
            self._trees.learn(commit)

    def recover(self, requests: Iterable[Request]) -> None:
        """Roll the cache back to the last commit."""
        self.cached_model.recover(requests)
        if self._trees is not None:
            self._trees.forget()
