"""Texts have the target's distribution on every device, however steps are run."""

import itertools
from dataclasses import dataclass, replace

import pytest

from draftwise.policies import POLICIES

from ..core.statistics_tools import chi_square_p_value, sequence_counts
from ..engine.exact import exact_distribution
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
    settings: str = "plain"

    def engine(self, models, max_batch_size=60):
        return assemble(
            self.place,
            models,
            self.recipe,
            max_batch_size,
            self.draft_noise,
            policy=self.policy,
            policy_options=LIVELY_OPTIONS.get(self.policy, {}),
            num_speculative_tokens=self.num_speculative_tokens,
            verification=self.verification,
        )

    def said(self, models):
        """First tokens, setting after setting."""
        engine, settings = self.engine(models), SETTINGS[self.settings]
        longer = itertools.cycle([0, 0, 0, 0, 1, 1, 1, 2, 3])
        turns = zip(range(self.num_requests), itertools.cycle(settings), strict=False)
        requests = [
            engine.add(
                None, prompt, replace(params, max_tokens=self.num_tokens + next(longer), seed=seed)
            )
            for seed, (prompt, params) in turns
        ]
        while engine.num_unfinished:
            engine.step()
        first = [request.output().token_ids[: self.num_tokens] for request in requests]
        return [first[index :: len(settings)] for index in range(len(settings))]

    def check(self, models):
        """The distribution of every setting that has one."""
        import torch

        model = models.reference(self.recipe)
        for (prompt, params), said in zip(SETTINGS[self.settings], self.said(models), strict=True):
            if params.temperature:
                expected = exact_distribution(model, prompt, params, self.num_tokens).joint()
                counts = sequence_counts(torch.tensor(said), self.vocab)
                assert chi_square_p_value(counts, expected) > NOT_UNLIKELY


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
        settings=settings,
        draft_noise=0.3,
    )
    case.check(models)
