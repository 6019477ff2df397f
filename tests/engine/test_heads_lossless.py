"""With a head as the draft, the engine's texts have exactly the target's distribution."""

from dataclasses import dataclass

import pytest

from draftwise.engine.parallel.pinned_threads import shares
from draftwise.kernels.native import library
from draftwise.kernels.native.library import kernel_in_use
from draftwise.policies import POLICIES

from ..levels import exhaustive_unless
from ..tiny_eagle_heads import EagleRecipe
from ..tiny_heads import HeadRecipe
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
EAGLE = EagleRecipe(bias=True)


@dataclass(frozen=True)
class HeadCase(Case):
    """A :class:`Case` whose draft is a head."""

    num_requests: int = NUM_REQUESTS_OF_EACH_POLICY
    head: HeadRecipe | EagleRecipe = HEAD

    def engine(self, models, max_batch_size=512):
        return engine_with_head(
            models,
            self.recipe,
            self.head,
            overlaps=self.overlaps,
            max_batch_size=max_batch_size,
            policy=self.policy,
            policy_options=LIVELY_OPTIONS.get(self.policy, {}),
            num_speculative_tokens=self.num_speculative_tokens,
            verification=self.verification,
        )


DRAFTING = [n for n, policy in POLICIES.items() if policy.lossless and policy.needs_draft]
CASES = [
    HeadCase("fixed", "block", 3, num_requests=16_000),
    HeadCase("fixed", "block", 1),
    HeadCase("fixed", "token", 4, vocab=4, num_tokens=6, head=HEAD.changed(vocab=4, draft_vocab=3)),
    HeadCase("fixed", "block", 3, head=HEAD.changed(draft_vocab=8)),
]
CASES += [
    HeadCase(name, method, gamma)
    for name in DRAFTING
    for method, gamma in (("block", 3), ("token", 2))
]


@pytest.mark.covering("case.policy", "case.verification")
@pytest.mark.parametrize(
    "case", exhaustive_unless(lambda case: case.policy in OF_EACH_KIND, CASES), ids=str
)
def test_texts_follow_the_target(models, case):
    assert_texts_follow_the_target(models, case)


@pytest.mark.parametrize(
    "case",
    [
        HeadCase("fixed", "block", 3, num_requests=16_000, head=EAGLE),
        HeadCase("svip", "token", 2, head=EAGLE.changed(layout="speculators", layernorms=True)),
        HeadCase("adaptive", "block", 3, head=EAGLE),
    ],
    ids=str,
)
def test_texts_with_heads_of_eagle_1_follow_the_target(models, case):
    assert_texts_follow_the_target(models, case)


@pytest.mark.skipif(kernel_in_use() != "native", reason="no native kernels on this machine")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_kernels_apply_penalties_like_pytorch(models, temperature, monkeypatch):
    case = HeadCase("svip", "block", 4, vocab=40, head=HEAD.changed(vocab=40, draft_vocab=30))
    assert_kernels_draft_like_pytorch(models, case, temperature, monkeypatch)


@pytest.mark.parametrize("policy", ["fixed", "sv"])
def test_texts_without_kernels_follow_the_target(models, policy, monkeypatch):
    monkeypatch.setattr(library, "_load", lambda: (None, "left out"))
    assert_texts_follow_the_target(models, HeadCase(policy, "block", 3))


@pytest.mark.skipif(shares() is None, reason="the machine has a single core")
@pytest.mark.parametrize("policy", ["fixed", "sv"])
def test_texts_with_overlap_follow_the_target(models, policy):
    assert_texts_follow_the_target(models, HeadCase(policy, "block", 3, overlaps=True))


@pytest.mark.parametrize(("max_batch_size", "num_requests"), [(1, 800), (16, 4000)])
def test_smaller_batches_follow_the_target(models, max_batch_size, num_requests):
    case = HeadCase(
        "fixed", "token", 2, vocab=4, num_tokens=3, head=HEAD.changed(vocab=4, draft_vocab=3)
    )
    tokens, _ = case.sampled(models, num_requests, max_batch_size)
    for p_value in case.p_values(models, tokens):
        assert p_value > NOT_UNLIKELY
