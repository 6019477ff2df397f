"""With an exit as the draft, the engine's texts have exactly the target's distribution."""

from dataclasses import dataclass

import pytest

from draftwise.kernels.native import library
from draftwise.policies import POLICIES

from ..levels import exhaustive_unless
from ..tiny_models import Recipe
from .exits import AdapterRecipe, engine_with_exit
from .test_lossless import (
    LIVELY_OPTIONS,
    NOT_UNLIKELY,
    NUM_REQUESTS_OF_EACH_POLICY,
    OF_EACH_KIND,
    Case,
    assert_texts_follow_the_target,
)

pytestmark = pytest.mark.slow

JUDGES = {"deeper exit": "target:exit=2", "model": None}


@dataclass(frozen=True)
class ExitCase(Case):
    """A :class:`Case` whose draft is an exit.

    Attributes:
        judge: what the companion is, if the policy asks one.
        draft: name of the draft; "model" for a model, "adapter" for an exit with an adapter.
    """

    num_requests: int = NUM_REQUESTS_OF_EACH_POLICY
    judge: str = "deeper exit"
    draft: str = "target:exit=1"

    def __str__(self):
        judge = f"-{self.judge}" if POLICIES[self.policy].uses_companion() else ""
        return f"{super().__str__()}{judge}-{self.draft}"

    @property
    def recipe(self):
        return Recipe(vocab=self.vocab, seed=3, config={"num_hidden_layers": 3})

    def engine(self, models, max_batch_size=512):
        draft = self.draft
        if draft == "model":
            draft = self.recipe.draft(0.1)
        elif draft == "adapter":
            draft = AdapterRecipe(exit=1, num_layers=3).save(models._root / "adapter")
        return engine_with_exit(
            models,
            self.recipe,
            draft,
            JUDGES[self.judge] or self.recipe.draft(noise=0.2, noise_seed=2),
            max_batch_size=max_batch_size,
            policy=self.policy,
            policy_options=LIVELY_OPTIONS.get(self.policy, {}),
            num_speculative_tokens=self.num_speculative_tokens,
            verification=self.verification,
        )


DRAFTING = [n for n, policy in POLICIES.items() if policy.lossless and policy.needs_draft]
CASES = [
    ExitCase("fixed", "block", 3, num_requests=16_000),
    ExitCase("fixed", "token", 4, vocab=4, num_tokens=6),
]
CASES += [
    ExitCase(name, method, gamma)
    for name in DRAFTING
    for method, gamma in (("block", 3), ("token", 2))
]
CASES += [
    ExitCase("sv", "block", 3, judge="model"),
    ExitCase("sv", "token", 2, judge="model"),
    ExitCase("sv", "block", 3, draft="model"),
    ExitCase("sv", "block", 3, draft="adapter"),
]


@pytest.mark.covering("case.policy", "case.verification", "case.judge", "case.draft")
@pytest.mark.parametrize(
    "case", exhaustive_unless(lambda case: case.policy in OF_EACH_KIND, CASES), ids=str
)
def test_texts_follow_the_target(models, case):
    assert_texts_follow_the_target(models, case)


@pytest.mark.parametrize("policy", ["fixed", "sv"])
def test_texts_without_kernels_follow_the_target(models, policy, monkeypatch):
    monkeypatch.setattr(library, "_load", lambda: (None, "left out"))
    assert_texts_follow_the_target(models, ExitCase(policy, "block", 3))


@pytest.mark.parametrize(("max_batch_size", "num_requests"), [(1, 800), (16, 4000)])
def test_smaller_batches_follow_the_target(models, max_batch_size, num_requests):
    case = ExitCase("fixed", "token", 2, vocab=4, num_tokens=3)
    tokens, _ = case.sampled(models, num_requests, max_batch_size)
    for p_value in case.p_values(models, tokens):
        assert p_value > NOT_UNLIKELY
