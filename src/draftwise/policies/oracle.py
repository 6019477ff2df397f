"""For studies: uses the target's acceptance probabilities in advance."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.types import CompanionScores, Draft, Plan
from draftwise.estimators.combined import Signals
from draftwise.policies.base import Signal
from draftwise.policies.filtering import Integers
from draftwise.policies.inputs import DraftPosition
from draftwise.policies.priced import Floats, PricedPolicy


class Oracle(PricedPolicy):
    """Prices like ``adaptive``, with the true acceptance probability as its estimate.

    The target scores every drafted token as soon as it is drawn. The time of these passes is not
    counted (``Engine.uncounted_seconds``), so the result shows what perfect estimates would give.
    The oracle knows the tokens drafted so far, not later ones. The rule is applied to the whole
    vocabulary as a filtered proposal, so even the oracle is lossless.
    """

    name = "oracle"
    summary = "knows the target's acceptance; for studies of what perfect estimates would gain"
    source = "this project"
    signals = frozenset({Signal.TARGET, Signal.LOAD, Signal.TOKEN_PROBABILITY})
    filters = True
    uses_target_oracle = True

    def uses_draft_signals(self) -> bool:
        """Always, because the target's probabilities are compared with the draft's."""
        return True

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Continue while the expected gain of one more token exceeds its cost."""
        self._uses_signals = True
        return super().keep_drafting(position)

    def expect(self, position: DraftPosition) -> Floats:
        """The acceptance probability of the token just drafted."""
        assert position.agreement is not None
        known: Floats = position.agreement.cpu().double().numpy()
        return known

    def select(self, draft: Draft, companion_scores: CompanionScores | None) -> Plan:
        """Select the tokens whose expected gain exceeds their cost."""
        self._draft, self._companion_scores = draft, companion_scores
        threshold = self.filter_threshold
        if companion_scores is None or threshold == 0:
            return Plan(draft.tokens, draft.lengths, draft.probs)
        return self.keep_likely(draft, companion_scores, self._expected, self._log_odds, threshold)

    def learn(
        self,
        signals: Signals,
        greedy: NDArray[np.bool_],
        acceptance: Floats,
        reach_probability: Floats,
    ) -> None:
        """Learn nothing, because the acceptance probabilities are exact."""

    @staticmethod
    def _log_odds(
        draft: Draft,
        companion_scores: CompanionScores | None,
        rows: Integers,
        places: Integers,
    ) -> Tensor:
        """``[n, vocab]`` log-odds of min(1, p/q)."""
        assert draft.signals is not None
        assert companion_scores is not None
        at = (
            torch.from_numpy(rows).to(draft.tokens.device),
            torch.from_numpy(places).to(draft.tokens.device),
        )
        p = companion_scores.probs[at]
        acceptance = (p / draft.signals.draft_probs[at].clamp(min=1e-30)).clamp(max=1.0)
        return acceptance.logit(eps=1e-7)
