"""Lossless TETRIS: selects the most likely tokens of the batch by filtered proposals."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from draftwise.core.types import CompanionScores, Draft, DraftSignals, Plan
from draftwise.policies.base import Policy, PolicyContext, Signal
from draftwise.policies.options import integer_option

# Change of the log threshold, in nats, if a step kept all of its tokens instead of none.
_RATE = 0.5
_LOWEST_LOG_THRESHOLD = -80.0


class Tetris(Policy):
    """Verifies tokens whose cumulative draft probability reaches the batch's threshold θ.

    TETRIS (Wu et al. 2025, algorithm 1) verifies, over the whole batch, the K tokens with the
    largest W_i = Π_{j≤i} q(x_j), its estimate of the probability that token i is accepted. Applied
    literally, this drops a token based on the token itself (see
    :mod:`draftwise.policies.tetris_published`). Here the rule is applied to the whole vocabulary,

        keep(x) = [W_{i−1}·q(x) ≥ θ],   q′(x) = q(x)·keep(x),

    with a threshold from earlier steps, so that keep is a function of the prefix. The first drawn
    token that is not kept ends the verified prefix; q′ is q·keep there. Since W decreases along a
    draft, the kept tokens are always a prefix.

    θ tracks the quantile that uses the paper's capacity: K = γ − ``extra`` tokens per drafting
    request on average. It starts at the first step's own quantile; that step verifies everything.
    Then it moves by log θ ← log θ + 0.5·(kept − K)/drafted. So K tokens are kept on average, and
    more or fewer in a single step. Tokens drawn in a step change θ for later steps only.
    """

    name = "tetris"
    summary = "the batch's most likely tokens within a capacity, by a threshold carried over"
    source = "Wu et al. 2025, TETRIS: Optimal Draft Token Selection, with filtered proposals"
    signals = frozenset({Signal.TOKEN_PROBABILITY, Signal.LOAD})
    filters = True
    reads_offers = True  # they are selected like all others

    def __init__(self, context: PolicyContext, extra: int = 1) -> None:
        """Set up.

        Args:
            context: see :class:`PolicyContext`.
            extra: number of drafted tokens per request beyond the average number verified, 0 … 64.
                The average verified is at least one.
        """
        super().__init__(context)
        self._per_request = verified_per_request(self.num_speculative_tokens, extra)
        self._log_threshold: float | None = None

    @property
    def threshold(self) -> float:
        """θ of the next step; 0 before the first step with a draft."""
        return 0.0 if self._log_threshold is None else math.exp(self._log_threshold)

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Filter every drafted position by the threshold of earlier steps."""
        if draft.signals is None:  # nothing was drafted
            return super().select(draft, companion_scores)
        product = cumulative_probability(draft.signals)
        before = torch.cat([torch.ones_like(product[:, :1]), product[:, :-1]], dim=1)
        keep = before.unsqueeze(2) * draft.signals.draft_probs >= self.threshold
        position = torch.arange(product.shape[1], device=product.device)
        drafted = position < torch.tensor(draft.lengths, device=product.device).unsqueeze(1)
        kept = keep.gather(2, draft.tokens.unsqueeze(2)).squeeze(2) & drafted
        lengths = kept.long().cumprod(dim=1).sum(dim=1)
        proposals = draft.probs
        if proposals is not None:
            proposals = proposals.clone()
            proposals[:, :-1] *= keep
        self._follow(product[drafted], int(lengths.sum()), draft)
        return Plan(draft.tokens, tuple(lengths.tolist()), proposals)

    def _follow(self, product: Tensor, num_kept: int, draft: Draft) -> None:
        """Move the threshold of later steps towards the quantile that fills the capacity."""
        if not len(product):
            return
        capacity = self._per_request * sum(length > 0 for length in draft.lengths)
        capacity = min(capacity, len(product))
        if self._log_threshold is None:
            smallest_kept = product.topk(capacity).values[-1]
            self._log_threshold = math.log(max(float(smallest_kept), 1e-30))
        else:
            self._log_threshold += _RATE * (num_kept - capacity) / len(product)
        self._log_threshold = min(0.0, max(_LOWEST_LOG_THRESHOLD, self._log_threshold))


def verified_per_request(num_speculative_tokens: int, extra: int) -> int:
    """Average number of tokens per draft that the capacity allows to verify.

    Raises:
        InvalidParameterError: ``extra`` is out of range.
    """
    return max(1, num_speculative_tokens - integer_option("extra", extra, 0, 64))


def cumulative_probability(signals: DraftSignals) -> Tensor:
    """W_i = Π_{j≤i} q(x_j): ``[batch, num_tokens]``, 0 beyond a draft's end."""
    return signals.token_probs.cumprod(dim=1)
