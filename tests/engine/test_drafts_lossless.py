"""With a head or an exit as the draft, texts have exactly the target's distribution."""

from dataclasses import dataclass

import pytest

from draftwise.engine.parallel.pinned_threads import shares
from draftwise.kernels.native import library
from draftwise.kernels.native.library import kernel_in_use
from draftwise.policies import POLICIES

from ..levels import exhaustive_unless
from ..tiny_eagle_heads import EagleRecipe
from ..tiny_heads import HeadRecipe
from ..tiny_models import Recipe
from .exits import AdapterRecipe, engine_with_exit
from .heads import engine_with_head
from .test_lossless import (
    LIVELY_OPTIONS,
    NOT_UNLIKELY,
    NUM_REQUESTS_OF_EACH_POLICY,
    OF_EACH_KIND,
    Case,
    assert_kernels_draft_like_pytorch,
    assert_texts_follow_the_target,
)

pytestmark = pytest.mark.slow

# It proposes three quarters of the tokens.
HEAD = HeadRecipe(layers=(0, 1), draft_vocab=6, settings={"norm_before_residual": True})
SMALL_HEAD = HEAD.changed(vocab=4, draft_vocab=3)
EAGLE = EagleRecipe(bias=True)
EXIT = "target:exit=1"


@dataclass(frozen=True)
class DraftCase(Case):
    """A :class:`Case` whose draft is a head or an exit.

    Attributes:
        draft: recipe of a head, or name of an exit; "adapter" for an exit with an adapter, and
            "model" for a model that an exit judges.
        judge: what the companion is, if the policy asks one: "deeper exit" or "model".
    """

    num_requests: int = NUM_REQUESTS_OF_EACH_POLICY
    draft: HeadRecipe | EagleRecipe | str = HEAD
    judge: str = "model"

    def __str__(self):
        judge = f"-{self.judge}" if POLICIES[self.policy].uses_companion() else ""
        return f"{super().__str__()}{judge}-{self.kind}"

    @property
    def kind(self):
        """Name of the kind of draft."""
        return self.draft if isinstance(self.draft, str) else type(self.draft).__name__

    @property
    def recipe(self):
        if not isinstance(self.draft, str):
            return super().recipe
        return Recipe(vocab=self.vocab, seed=3, config={"num_hidden_layers": 3})

    def engine(self, models, max_batch_size=512):
        settings = {
            "max_batch_size": max_batch_size,
            "policy": self.policy,
            "policy_options": LIVELY_OPTIONS.get(self.policy, {}),
            "num_speculative_tokens": self.num_speculative_tokens,
            "verification": self.verification,
            "overlaps": self.overlaps,
        }
        if not isinstance(self.draft, str):
            return engine_with_head(models, self.recipe, self.draft, **settings)
        judge = self.recipe.draft(noise=0.2, noise_seed=2)
        judge = "target:exit=2" if self.judge == "deeper exit" else judge
        draft = self.draft
        if draft == "model":
            draft = self.recipe.draft(0.1)
        elif draft == "adapter":
            draft = AdapterRecipe(exit=1, num_layers=3).save(models._root / "adapter")
        return engine_with_exit(models, self.recipe, draft, judge, **settings)


DRAFTS = {"head": {}, "exit": {"draft": EXIT, "judge": "deeper exit"}}
SMALL = {"head": {"draft": SMALL_HEAD}, "exit": DRAFTS["exit"]}
every_draft = pytest.mark.parametrize("draft", DRAFTS)
DRAFTING = [n for n, policy in POLICIES.items() if policy.lossless and policy.needs_draft]
CASES = [
    DraftCase("fixed", "block", 1),
    DraftCase("fixed", "block", 3, draft=HEAD.changed(draft_vocab=8)),
    DraftCase("sv", "block", 3, draft=EXIT),
    DraftCase("sv", "token", 2, draft=EXIT),
    DraftCase("sv", "block", 3, draft="model", judge="deeper exit"),
    DraftCase("sv", "block", 3, draft="adapter", judge="deeper exit"),
]
for kind in DRAFTS:
    CASES += [
        DraftCase("fixed", "block", 3, num_requests=16_000, **DRAFTS[kind]),
        DraftCase("fixed", "token", 4, vocab=4, num_tokens=6, **SMALL[kind]),
    ]
    CASES += [
        DraftCase(name, method, gamma, **DRAFTS[kind])
        for name in DRAFTING
        for method, gamma in (("block", 3), ("token", 2))
    ]


@pytest.mark.covering("case.policy", "case.verification", "case.judge", "case.kind")
@pytest.mark.parametrize(
    "case", exhaustive_unless(lambda case: case.policy in OF_EACH_KIND, CASES), ids=str
)
def test_texts_follow_the_target(models, case):
    assert_texts_follow_the_target(models, case)


@pytest.mark.parametrize(
    "case",
    [
        DraftCase("fixed", "block", 3, num_requests=16_000, draft=EAGLE),
        DraftCase("svip", "token", 2, draft=EAGLE.changed(layout="speculators", layernorms=True)),
        DraftCase("adaptive", "block", 3, draft=EAGLE),
    ],
    ids=str,
)
def test_texts_with_heads_of_eagle_1_follow_the_target(models, case):
    assert_texts_follow_the_target(models, case)


@pytest.mark.skipif(kernel_in_use() != "native", reason="no native kernels on this machine")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_kernels_apply_penalties_like_pytorch(models, temperature, monkeypatch):
    case = DraftCase("svip", "block", 4, vocab=40, draft=HEAD.changed(vocab=40, draft_vocab=30))
    assert_kernels_draft_like_pytorch(models, case, temperature, monkeypatch)


@every_draft
@pytest.mark.parametrize("policy", ["fixed", "sv"])
def test_texts_without_kernels_follow_the_target(models, draft, policy, monkeypatch):
    monkeypatch.setattr(library, "_load", lambda: (None, "left out"))
    assert_texts_follow_the_target(models, DraftCase(policy, "block", 3, **DRAFTS[draft]))


@pytest.mark.skipif(shares() is None, reason="the machine has a single core")
@pytest.mark.parametrize("policy", ["fixed", "sv"])
def test_texts_with_overlap_follow_the_target(models, policy):
    assert_texts_follow_the_target(models, DraftCase(policy, "block", 3, overlaps=True))


@every_draft
@pytest.mark.parametrize(("max_batch_size", "num_requests"), [(1, 800), (16, 4000)])
def test_smaller_batches_follow_the_target(models, draft, max_batch_size, num_requests):
    case = DraftCase("fixed", "token", 2, vocab=4, num_tokens=3, **SMALL[draft])
    tokens, _ = case.sampled(models, num_requests, max_batch_size)
    for p_value in case.p_values(models, tokens):
        assert p_value > NOT_UNLIKELY
