"""The interface of a proposer, which drafts continuations of requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from draftwise.core.latency import LatencyModel
from draftwise.core.types import Draft
from draftwise.engine.batch import Batch
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.lifecycle import Commit
from draftwise.engine.masks import allowed_prefix
from draftwise.engine.oracle import TargetOracle
from draftwise.engine.proposers.proposals import Proposals, planned_lengths, stopped_draft
from draftwise.engine.request import Request
from draftwise.engine.suffix.corpus import SuffixCorpus
from draftwise.policies.base import Policy, planned_drafts


@dataclass(frozen=True)
class ProposerContext:
    """The context in which a proposer is created.

    Attributes:
        vocab_size: the target's vocabulary size.
        device: device of the target's logits.
        max_batch_size: maximum number of running requests.
        max_model_len: maximum length of prompt and output together, in tokens.
        draft_model: the draft model with its cache; ``None`` for proposers without a model.
        oracle: computes the target's acceptance probabilities for a policy; for studies.
        corpus: texts that drafts may continue; ``None`` without a corpus.
        remembers_outputs: whether the outputs of ended requests are added to the corpus.
        tree_width: maximum number of children of a node in a token tree; 1 for chains.
        proposals: see :class:`draftwise.speculation.SpeculationConfig`.
    """

    vocab_size: int
    device: torch.device
    max_batch_size: int
    max_model_len: int
    draft_model: CachedModel | None = None
    oracle: TargetOracle | None = None
    corpus: SuffixCorpus | None = None
    remembers_outputs: bool = False
    tree_width: int = 1
    proposals: str | None = None


class Proposer(ABC):
    """Proposes a continuation for each generating request of a step.

    A proposer keeps state for each request from :meth:`admit` to :meth:`retire`. In every step the
    engine calls :meth:`propose` once, and :meth:`commit` after verification.

    The output keeps the target's distribution if each proposed token satisfies one of two
    conditions. Either it is drawn from the distribution in the draft, with the step's random
    numbers. Or it is proposed with certainty (``Draft.probs`` is ``None``), and chosen before the
    target's token is drawn.

    Attributes:
        name: the name that users give.
        summary: one line for listings.
        looking_seconds: time that the step spent looking for continuations beside a draft model.
        drafts_trees: whether it can propose token trees.
        needs_model: whether ``SpeculationConfig.draft`` names a model for it.
        estimates_acceptance: whether it proposes with certainty and estimates the acceptance of
            each token before anything is drafted. The policy then chooses draft lengths by these
            estimates, over the whole batch.
        max_context: maximum length of a text that it continues, in tokens.
        state_layers: the target's hidden states that commits bring to it; see
            :class:`draftwise.models.hidden_states.StateTap`. Empty for none.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    drafts_trees: ClassVar[bool] = False
    needs_model: ClassVar[bool] = False
    estimates_acceptance: ClassVar[bool] = False

    def __init__(self, context: ProposerContext) -> None:
        """Set up.

        Args:
            context: sizes, and the draft model if there is one.
        """
        self.context = context
        self.max_context = context.max_model_len
        self.state_layers: tuple[int, ...] = ()
        self.looking_seconds = 0.0

    @abstractmethod
    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Draft as many tokens as the policy wants.

        Args:
            batch: the step's batch. Nothing is drafted for requests whose :attr:`Batch.can_draft`
                is False.
            policy: it is asked once for the draft lengths, and then after each token which requests
                continue.
        """

    def admit(self, request: Request) -> None:  # noqa: B027
        """A request joins the batch. Its prompt and its cache slot are set."""

    def commit(self, commit: Commit) -> None:  # noqa: B027
        """A step ended. The requests gained the accepted tokens and one more token."""

    def retire(self, request: Request) -> None:  # noqa: B027
        """A request ended. It still has its cache slot."""

    def recover(self, requests: Iterable[Request]) -> None:  # noqa: B027
        """A step failed: return to the state after the last commit.

        Raises:
            EngineError: the state is lost, and the engine becomes unusable.
        """

    @classmethod
    def cost_model(cls, latency: LatencyModel) -> LatencyModel:
        """The cost of steps with this proposer, for policies that price their choices.

        Args:
            latency: cost of the models' forward passes on this machine.

        Returns:
            The cost model with this proposer's cost per drafted token as the draft stage. A
            proposer without a model is counted as free.
        """
        return latency

    def close(self) -> None:  # noqa: B027
        """Release memory, threads and processes."""

    def room(self, request: Request) -> int:
        """Maximum number of tokens after a request's text that this proposer can propose."""
        return self.max_context - len(request.tokens)

    def draft_limits(self, batch: Batch, policy: Policy) -> list[int]:
        """Ask the policy for the ``[batch]`` maximum draft lengths."""
        return list(planned_drafts(policy, batch.states(self.room)).lengths)


class TokenProposer(Proposer):
    """A proposer that proposes each token with certainty, without a distribution.

    Subclasses return the proposed tokens of one request, or of all requests together. This class
    does the rest.
    """

    def continuation(self, request: Request, max_tokens: int) -> Sequence[int]:
        """Tokens that may follow a request's text.

        Args:
            request: the request. Its ``tokens`` are the prompt and the output so far.
            max_tokens: maximum number of tokens to propose, at least 1.
        """
        raise NotImplementedError

    def proposals(self, batch: Batch, limits: Sequence[int]) -> Proposals:
        """The proposals of all requests, by default those of :meth:`continuation`.

        Args:
            batch: the step's batch.
            limits: ``[batch]`` maximum number of tokens.
        """
        made = Proposals.nothing(len(limits), max(limits, default=0))
        for index, (request, limit) in enumerate(zip(batch.generating, limits, strict=True)):
            if limit > 0:
                tokens = self.continuation(request, limit)[:limit]
                made.tokens[index, : len(tokens)] = tokens
                made.lengths[index] = len(tokens)
        return made

    def allowed_proposals(self, batch: Batch, limits: Sequence[int]) -> Proposals:
        """:meth:`proposals` up to the first token that does not exist or that a grammar forbids."""
        made = self.proposals(batch, limits)
        made.cut_at_vocabulary(self.context.vocab_size)
        for index, request in enumerate(batch.generating):
            if request.is_masked:
                tokens = made.tokens[index, : made.lengths[index]].tolist()
                allowed = allowed_prefix(request, tokens, self.context.vocab_size)
                made.lengths[index] = len(allowed)
        return made

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Propose the continuations, up to what the policy and the requests' grammars allow."""
        if self.estimates_acceptance:
            return self._propose_by_estimates(batch, policy)
        made = self.allowed_proposals(batch, self.draft_limits(batch, policy))
        return self._draft(made, made.lengths.tolist(), batch, policy)

    def _propose_by_estimates(self, batch: Batch, policy: Policy) -> Draft:
        """Ask the policy for draft lengths when the acceptance of all tokens is estimated."""
        states = batch.states(self.room, has_model=False)
        made = Proposals.nothing(len(states))
        if policy.looks_for_offers(states):
            limits = [min(state.draft_limit, policy.num_speculative_tokens) for state in states]
            made = self.allowed_proposals(batch, limits)
        return self._draft(made, planned_lengths(made, states, policy), batch, policy)

    def _draft(self, made: Proposals, lengths: list[int], batch: Batch, policy: Policy) -> Draft:
        context = self.context
        return stopped_draft(
            made, lengths, policy, context.vocab_size, context.device, batch.uniforms
        )
