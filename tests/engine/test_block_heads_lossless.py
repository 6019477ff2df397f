"""With a head that drafts blocks, the engine's texts have exactly the target's distribution.

The proposals are one-hot, drawn independently of each other, or drawn from left to right.
"""

from dataclasses import dataclass

import pytest

from draftwise.core.types import Plan
from draftwise.policies import Signal
from draftwise.policies.base import PolicyContext
from draftwise.policies.fixed import FixedLength

from ..tiny_blocks import BlockRecipe
from .heads import engine_with_head, head_folder
from .test_lossless import (
    IMPOSSIBLE,
    NOT_UNLIKELY,
    Case,
    assert_texts_follow_the_target,
)

pytestmark = pytest.mark.slow

# The target has one layer.
DFLASH = BlockRecipe(layers=(-1,), block_size=4)
# It proposes three quarters of the tokens.
DSPARK = DFLASH.changed(discards_anchor=False, draft_vocab=6)


@dataclass(frozen=True)
class BlockCase(Case):
    """A :class:`Case` whose draft is a head that drafts blocks."""

    num_requests: int = 4_000
    head: BlockRecipe = DFLASH
    proposals: str | None = None
    truncates: type[FixedLength] | None = None

    def __str__(self):
        return f"{self.head.markov or 'dflash'}-{super().__str__()}-{self.proposals}"

    def engine(self, models, max_batch_size=512):
        layout = "z-lab" if self.head.discards_anchor else "speculators"
        return engine_with_head(
            models,
            self.recipe,
            folder=head_folder(models, self.head, layout),
            max_batch_size=max_batch_size,
            policy=self.policy,
            num_speculative_tokens=self.num_speculative_tokens,
            verification=self.verification,
            proposals=self.proposals,
            policy_object=self.truncates and self.truncates(PolicyContext(3)),
        )


@pytest.mark.parametrize(
    "case",
    [
        BlockCase("fixed", "block", 3),
        BlockCase("sv", "token", 2),
        BlockCase("svip", "token", 3, head=DSPARK.changed(markov="vanilla")),
        BlockCase("fixed", "block", 4, head=DSPARK.changed(markov="gated")),
        BlockCase("adaptive", "block", 3, head=DSPARK.changed(markov="rnn")),
        BlockCase("fixed", "token", 3, head=DFLASH.changed(second=True)),
    ],
    ids=str,
)
def test_texts_follow_the_target(models, case):
    """By default one-hot without a Markov head, and conditional with one."""
    assert_texts_follow_the_target(models, case)


def test_texts_with_independent_proposals_follow_the_target(models):
    assert_texts_follow_the_target(models, BlockCase("svip", "block", 3, proposals="sampled"))


class _Truncates(FixedLength):
    """Verifies the first tokens of each draft. Positions after them have no proposal."""

    def lengths(self, signals):
        raise NotImplementedError

    def select(self, draft, companion_scores):
        if draft.signals is None or not any(draft.lengths):
            return super().select(draft, companion_scores)
        lengths = tuple(map(min, self.lengths(draft.signals).tolist(), draft.lengths))
        if draft.probs is not None:
            for row, length in enumerate(lengths):
                draft.probs[row, length:] = 0.0
        return Plan(draft.tokens, lengths, draft.probs)


class _ByConfidence(_Truncates):
    """Verifies tokens while the head expects that all of them are accepted."""

    signals = frozenset({Signal.CONFIDENCE})

    def lengths(self, signals):
        return (signals.confidence.cumprod(dim=1) >= 0.45).sum(dim=1)


def test_texts_truncated_by_confidence_follow_the_target(models):
    """The confidence of a token depends on the tokens before it only."""
    head = DSPARK.changed(markov="vanilla", confidence=True)
    case = BlockCase("fixed", "token", 3, head=head, truncates=_ByConfidence)
    tokens, requests = case.sampled(models)
    stats = [request.stats for request in requests]
    assert 0 < sum(each.num_verified for each in stats) < sum(each.num_drafted for each in stats)
    assert min(case.p_values(models, tokens)) > NOT_UNLIKELY


class _LooksBack(_Truncates):
    """Cuts a draft before the first token that the head finds unlikely.

    The decision about a position uses what was drawn there, and the proposal does not say so.
    """

    signals = frozenset({Signal.TOKEN_PROBABILITY})

    def lengths(self, signals):
        return (signals.token_probs >= 0.3).long().cumprod(dim=1).sum(dim=1)


@pytest.mark.parametrize("markov", [None, "vanilla"])
def test_a_truncation_that_looks_back_is_detected(models, markov):
    """Where tokens are drawn. One-hot proposals may be cut by any rule."""
    if markov is None:
        case = BlockCase("fixed", "token", 3, num_requests=2_000, truncates=_LooksBack)
        tokens, _ = case.sampled(models)
        assert min(case.p_values(models, tokens)) > NOT_UNLIKELY
    head = DFLASH.changed(markov=markov)
    case = BlockCase(
        "fixed",
        "token",
        3,
        num_requests=7_000,
        head=head,
        proposals="sampled",
        truncates=_LooksBack,
    )
    tokens, _ = case.sampled(models)
    assert min(case.p_values(models, tokens)) < IMPOSSIBLE
