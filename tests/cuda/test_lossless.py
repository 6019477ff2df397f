"""Texts have the target's distribution on every device, however steps are run."""

from dataclasses import dataclass, replace

import pytest

from draftwise.policies import POLICIES

from ..engine.test_lossless import COLD, HOT, LIVELY_OPTIONS, NOT_UNLIKELY, PENALISED, PLAIN, Case
from .placing import RECORDED, Place, assemble

pytestmark = pytest.mark.slow

# Batches of all plain requests, of filtered ones among greedy ones, and with penalties.
SETTINGS = {
    "plain": (([1, 2, 3], PLAIN), ([1], PLAIN)),
    "filtered": (([3, 0, 2, 2, 1], COLD), ([1], HOT), ([1, 2, 3], replace(PLAIN, temperature=0))),
    "penalised": (([1, 2, 3], PLAIN), ([0, 3], PENALISED)),
}


@dataclass(frozen=True)
class PlacedCase(Case):
    """A case of the engine's own tests at a place."""

    place: Place | None = None

    def engine(self, models, max_batch_size=60):
        return assemble(
            self.place,
            models,
            self.recipe,
            min(max_batch_size, 60),
            self.draft_noise,
            policy=self.policy,
            policy_options=LIVELY_OPTIONS.get(self.policy, {}),
            num_speculative_tokens=self.num_speculative_tokens,
            verification=self.verification,
        )


@pytest.mark.covering("policy", "gamma", "settings")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(
    ("policy", "gamma"),
    [("none", 0), ("fixed", 3), ("fixed", 10), ("svip", 10), ("adaptive", 4), ("sv", 4)],
)
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_texts_follow_the_target(models, place, policy, gamma, settings):
    assert POLICIES[policy].lossless
    case = PlacedCase(
        policy,
        "block",
        gamma,
        vocab=4,
        num_tokens=3,
        num_requests=2400,
        place=place,
        settings=SETTINGS[settings],
        draft_noise=0.3,
    )
    tokens, _ = case.sampled(models)
    for p_value in case.p_values(models, tokens):
        assert p_value > NOT_UNLIKELY
