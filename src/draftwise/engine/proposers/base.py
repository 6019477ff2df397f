"""The interface of a proposer, which drafts continuations of requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from draftwise.core.latency import LatencyModel
from draftwise.core.types import Draft
from draftwise.engine.batch import Batch
from draftwise.engine.cached_model import CachedModel
from draftwise.engine.drafting.loop import DraftProgress, answer
from draftwise.engine.lifecycle import Commit
from draftwise.engine.masks import allowed_prefix
from draftwise.engine.oracle import TargetOracle
from draftwise.engine.request import Request
from draftwise.policies.base import DraftPosition, Policy


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
    """

    vocab_size: int
    device: torch.device
    max_batch_size: int
    max_model_len: int
    draft_model: CachedModel | None = None
    oracle: TargetOracle | None = None


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
        needs_model: whether ``SpeculationConfig.draft`` names a model for it.
        max_context: maximum length of a text that it continues, in tokens.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    needs_model: ClassVar[bool] = False

    def __init__(self, context: ProposerContext) -> None:
        """Set up.

        Args:
            context: sizes, and the draft model if there is one.
        """
        self.context = context
        self.max_context = context.max_model_len

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

        Args:
            requests: the requests that continue.

        Raises:
            EngineError: the state is lost, and the engine becomes unusable.
        """

    def cost_model(self, latency: LatencyModel) -> LatencyModel:
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
        states = batch.states(self.room)
        lengths = policy.draft_lengths(states)
        return [min(n, state.draft_limit) for n, state in zip(lengths, states, strict=True)]


class Proposal(NamedTuple):
    """Tokens that are proposed with certainty for one request.

    Attributes:
        tokens: the proposed tokens.
        acceptance: estimated acceptance probability of each token; empty if it is unknown.
    """

    tokens: Sequence[int]
    acceptance: Sequence[float] = ()


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

    def proposals(self, batch: Batch, limits: list[int]) -> list[Proposal]:
        """``[batch]`` proposals, by default those of :meth:`continuation`.

        Args:
            batch: the step's batch.
            limits: ``[batch]`` maximum number of tokens.
        """
        return [
            Proposal(self.continuation(request, limit) if limit else ())
            for request, limit in zip(batch.generating, limits, strict=True)
        ]

    def propose(self, batch: Batch, policy: Policy) -> Draft:
        """Propose the continuations, up to what the policy and the requests' grammars allow."""
        limits = self.draft_limits(batch, policy)
        context, signals = self.context, policy.uses_draft_signals()
        proposals = self.proposals(batch, limits)
        proposed = [
            allowed_prefix(request, proposal.tokens[:limit], context.vocab_size)
            for request, proposal, limit in zip(batch.generating, proposals, limits, strict=True)
        ]
        acceptance = [proposal.acceptance for proposal in proposals] if signals else None

        def one_hot(tokens: list[list[int]]) -> Draft:
            return Draft.one_hot(
                tokens, context.vocab_size, batch.uniforms, acceptance, context.device
            )

        made = one_hot(proposed)
        if not policy.may_stop_drafting():
            return made
        progress = DraftProgress(made.lengths)
        while progress.active:
            answered = answer(policy, _position(made, progress.num_tokens, progress.active))
            progress.advance(answered)
        return one_hot([tokens[:n] for tokens, n in zip(proposed, progress.lengths, strict=True)])


def _position(draft: Draft, index: int, active: list[int]) -> DraftPosition:
    tokens, signals = draft.tokens[active, index], draft.signals
    if signals is None:
        return DraftPosition(index, active, tokens, None, None, None)
    return DraftPosition(
        index,
        active,
        tokens,
        signals.draft_probs[active, index],
        signals.entropy[active, index],
        signals.token_probs[active, index],
    )
