"""For studies: uses the target's acceptance probabilities in advance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftwise.core.types import CompanionScores, Draft, Plan
from draftwise.policies.base import DraftPlan, Signal
from draftwise.policies.filtering import Integers, keep_likely
from draftwise.policies.inputs import DraftPosition, RequestState
from draftwise.policies.price import Adaptive


class Oracle(Adaptive):
    """Prices every token like ``adaptive``, with its true acceptance probability.

    The target scores every drafted token as soon as it is drawn. The time of these passes is not
    counted (``Engine.uncounted_seconds``), so the result shows what perfect estimates would give.
    The oracle knows the tokens drafted so far, not later ones. A draft goes on while its tokens are
    worth another pass, and tokens are verified while they are worth their price. The rule is
    applied to the whole vocabulary as a filtered proposal, so even the oracle is lossless.
    """

    name = "oracle"
    summary = "knows the target's acceptance; for studies of what perfect estimates would gain"
    source = "this project"
    signals = frozenset({Signal.TARGET, Signal.LOAD, Signal.TOKEN_PROBABILITY})
    filters = True
    uses_target_oracle = True

    def plan_drafts(self, requests: Sequence[RequestState]) -> DraftPlan:
        """γ for every request. The model drafts for every request that it can draft for."""
        super().plan_drafts(requests)
        size, gamma = len(requests), self.num_speculative_tokens
        self._choice = self._choice._replace(by_model=np.ones(size, bool))
        self._expected = np.zeros((size, gamma))
        self._reach = np.ones(size)
        self._greedy = np.array([request.greedy for request in requests], dtype=bool)
        return DraftPlan([gamma] * size, [not request.has_model for request in requests])

    def keep_drafting(self, position: DraftPosition) -> Tensor:
        """Continue while the tokens drafted so far are worth one more pass and verified token."""
        assert position.agreement is not None
        active = np.asarray(position.requests)
        known = position.agreement.cpu().double().numpy()
        self._expected[active, position.index] = known
        self._reach[active] *= known
        a_pass = self._costs.draft(len(active)) / len(active)
        return torch.from_numpy(self._reach[active] >= self._row_price + self._second * a_pass)

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Select the tokens whose expected gain exceeds their cost."""
        if companion_scores is None:
            return Plan(draft.tokens, draft.lengths, draft.probs)
        thresholds = np.full(len(self._requests), self._row_price)
        expected = self._expected
        return keep_likely(draft, companion_scores, expected, _log_odds, thresholds, self._greedy)


def _log_odds(
    draft: Draft, companion_scores: CompanionScores | None, rows: Integers, places: Integers
) -> Tensor:
    """``[n, vocab]`` log-odds of min(1, p/q)."""
    assert draft.signals is not None
    assert companion_scores is not None
    device = draft.tokens.device
    at = torch.from_numpy(rows).to(device), torch.from_numpy(places).to(device)
    p = companion_scores.probs[at]
    acceptance = (p / draft.signals.draft_probs[at].clamp(min=1e-30)).clamp(max=1.0)
    return acceptance.logit(eps=1e-7)
