"""The upper bound: the target's own acceptance, known in advance. For studies only."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftwise.core.types import Draft, Judgement, Plan
from draftwise.estimators.combined import Signals
from draftwise.policies.base import DraftPosition, Signal
from draftwise.policies.filtering import Integers
from draftwise.policies.priced import Floats, PricedPolicy


class Oracle(PricedPolicy):
    """Prices as ``adaptive`` does, with the acceptance probability itself for its estimate.

    The target judges every drafted token as soon as it is drawn, in passes whose time is not
    counted (``Engine.uncounted_seconds``): what is left is what perfect estimates would give. It
    knows the tokens drafted so far, not those to come. The rule is applied to the whole vocabulary
    as a filtered proposal, so even the oracle is lossless.
    """

    name = "oracle"
    summary = "knows the target's acceptance; an upper bound for studies, not for use"
    source = "this project"
    signals = frozenset({Signal.TARGET, Signal.LOAD, Signal.TOKEN_PROBABILITY})
    filters = True
    judged_by_target = True

    def uses_draft_signals(self) -> bool:
        """Always: what it is told is held against them."""
        return True

    def keep_drafting(self, position: DraftPosition) -> Tensor | None:
        """Go on while one more draw is worth its price."""
        self._watches = True
        return super().keep_drafting(position)

    def expect(self, position: DraftPosition) -> Floats:
        """The acceptance probability of the token just drafted."""
        assert position.agreement is not None
        known: Floats = position.agreement.cpu().double().numpy()
        return known

    def select(self, draft: Draft, judgement: Judgement | None) -> Plan:
        """Verify what pays."""
        self._draft, self._judgement = draft, judgement
        threshold = self._price.point.threshold
        if judgement is None or threshold == 0:
            return Plan(draft.tokens, draft.lengths, draft.probs)
        return self.keep_likely(draft, judgement, self._expected, self._log_odds, threshold)

    def learn(
        self, signals: Signals, greedy: NDArray[np.bool_], acceptance: Floats, reached: Floats
    ) -> None:
        """It knows already."""

    @staticmethod
    def _log_odds(
        draft: Draft,
        judgement: Judgement | None,
        rows: Integers,
        places: Integers,
    ) -> Tensor:
        """``[n, vocab]`` log-odds of min(1, p/q)."""
        assert draft.signals is not None
        assert judgement is not None
        at = (
            torch.from_numpy(rows).to(draft.tokens.device),
            torch.from_numpy(places).to(draft.tokens.device),
        )
        p = judgement.beliefs[at]
        acceptance = (p / draft.signals.beliefs[at].clamp(min=1e-30)).clamp(max=1.0)
        return acceptance.logit(eps=1e-7)
