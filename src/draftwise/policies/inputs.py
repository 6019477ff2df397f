"""Inputs of a policy: the state of each request, and the drafts of a step so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

# Initial estimate for a request without verified tokens, and the weight of each new token.
_INITIAL_MEAN = 0.6
_TOKEN_WEIGHT = 0.1


class AcceptanceHistory:
    """Mean acceptance probability of a request's recent tokens, with exponential forgetting.

    Attributes:
        mean: running mean, 0 … 1.
    """

    def __init__(self) -> None:
        """Start from the initial estimate."""
        self.mean = _INITIAL_MEAN

    def learn(self, acceptance: Sequence[float]) -> None:
        """Update the mean with the acceptance probabilities of a step's verified tokens.

        Each token is weighted by the probability that all tokens before it were accepted.

        Args:
            acceptance: acceptance probability of each verified token, in draft order.
        """
        reach_probability = 1.0
        for probability in acceptance:
            self.mean += _TOKEN_WEIGHT * reach_probability * (probability - self.mean)
            reach_probability *= probability


class RequestState(NamedTuple):
    """The state of a request before a step, as a policy sees it.

    Attributes:
        num_tokens: number of tokens so far, prompt and output.
        num_output_tokens: number of tokens generated so far.
        draft_limit: maximum draft length, limited by the remaining output and the models' contexts;
            0 while the prompt is being processed.
        request_id: unique number.
        greedy: whether it is decoded at temperature 0.
        history: mean acceptance probability of its recent tokens, 0 … 1.
        policy: name of the policy that it requests; ``None`` for the engine's.
        offer: estimated acceptance probability of each token of a continuation that is known
            before anything is drafted, such as the text after an earlier occurrence of the last
            tokens. Empty without one.
        has_model: whether a draft model can draft for it.
        num_behind: number of its tokens that the draft model has not read yet, besides the newest.
        num_left: maximum number of further tokens of its output. ``None`` if other requests may
            join the batch.
    """

    num_tokens: int
    num_output_tokens: int
    draft_limit: int
    request_id: int = 0
    greedy: bool = False
    history: float = 0.5
    policy: str | None = None
    offer: Sequence[float] = ()
    has_model: bool = True
    num_behind: int = 0
    num_left: int | None = None


@dataclass(frozen=True)
class DraftPosition:
    """The token just drafted, for the requests that are still drafting.

    In token trees of a draft model, an entry is a node whose children may be drafted next. A
    request can have several.

    The signals are ``None`` if the policy uses none of the draft's signals.

    Attributes:
        index: position in the draft, from 0; in token trees, the depth.
        requests: index of each ``active`` request in the step's batch.
        tokens: ``[active]`` int64, the token drawn.
        draft_probs: ``[active, vocab]`` float32, the draft's own distribution: q, and for greedy
            requests the distribution at temperature 1.
        entropy: ``[active]`` float32, H of ``draft_probs`` in nats.
        token_probs: ``[active]`` float32, the probability of the drawn token in ``draft_probs``.
        agreement: ``[active]`` float32, the target's acceptance probability of the token, for
            policies with ``uses_target_oracle``.
        next_confidence: ``[active]`` float32, the estimated probability that the next token is
            accepted if all before it are; ``None`` for drafts without a head that estimates it, and
            at the end of a block.
    """

    index: int
    requests: Sequence[int]
    tokens: Tensor
    draft_probs: Tensor | None
    entropy: Tensor | None
    token_probs: Tensor | None
    agreement: Tensor | None = None
    next_confidence: Tensor | None = None

    def with_agreement(self, agreement: Tensor) -> DraftPosition:
        """A copy with the target's acceptance probabilities, ``[active]`` float32."""
        return replace(self, agreement=agreement)

    def with_confidence(self, confidence: Tensor | None) -> DraftPosition:
        """A copy with ``next_confidence``."""
        return replace(self, next_confidence=confidence)

    def of(self, active: list[int], place: Mapping[int, int]) -> DraftPosition:
        """Some entries of this position.

        Args:
            active: their indices.
            place: new index of each of their requests.
        """
        index = torch.tensor(active, device=self.tokens.device)

        def own(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index]

        return DraftPosition(
            self.index,
            [place[self.requests[at]] for at in active],
            self.tokens[index],
            own(self.draft_probs),
            own(self.entropy),
            own(self.token_probs),
            own(self.agreement),
            own(self.next_confidence),
        )


class LazyPosition(DraftPosition):
    """A position whose distributions are fetched from the draft's memory on first access."""

    def __init__(
        self,
        index: int,
        requests: Sequence[int],
        tokens: Tensor,
        everyone: Tensor,
        entropy: Tensor,
        token_probs: Tensor,
        agreement: Tensor | None = None,
        widen: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Set up. The other arguments are those of :class:`DraftPosition`.

        Args:
            everyone: ``[batch, vocab]`` float32 distributions of all requests, on any device.
            widen: converts distributions to the target's vocabulary; ``None`` if they are over it.
        """
        values = {
            "index": index,
            "requests": requests,
            "tokens": tokens,
            "_everyone": everyone,
            "entropy": entropy,
            "token_probs": token_probs,
            "agreement": agreement,
            "_widen": widen,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def with_agreement(self, agreement: Tensor) -> LazyPosition:
        """See :class:`DraftPosition`."""
        return self._changed(agreement=agreement)

    def with_confidence(self, confidence: Tensor | None) -> LazyPosition:
        """See :class:`DraftPosition`."""
        return self._changed(next_confidence=confidence)

    def _changed(self, **changes: Tensor | None) -> LazyPosition:
        changed = copy(self)
        vars(changed).update(changes)
        return changed

    @property
    def draft_probs(self) -> Tensor | None:
        """``[active, vocab]`` float32 on the host."""
        everyone: Tensor = vars(self)["_everyone"]
        widen: Callable[[Tensor], Tensor] | None = vars(self)["_widen"]
        probs = everyone.cpu()[list(self.requests)]
        return probs if widen is None else widen(probs)
