"""The tokens that TETRIS verifies, and the losslessness of its filtered form."""

import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.rejection import accept
from draftwise.core.types import Draft
from draftwise.policies import PolicyContext, RequestState, create_policy

from ..core.speculation import DraftBatch, Speculation, exact_law, keep_all
from ..core.statistics_tools import integer_tree, random_tree, total_variation
from ..stand_ins import draft_signals
from .driving import lengths_of

property_test = settings(deadline=None, derandomize=True, max_examples=40)


def create(name, gamma, threshold=None, **options):
    policy = create_policy(name, PolicyContext(gamma), options)
    if threshold is not None:
        policy._log_threshold = math.log(threshold) if threshold else None
    return policy


def random_draft(num_requests, width, vocab=6, seed=0, sharpness=1.5):
    """A draft of random lengths; every third request drafts nothing."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(num_requests, width + 1, vocab, generator=generator)
    probs = logits.softmax(dim=2)
    lengths = torch.randint(1, width + 1, (num_requests,), generator=generator)
    lengths[2::3] = 0
    probs[torch.arange(width + 1) >= lengths.unsqueeze(1)] = 0
    tokens = torch.zeros(num_requests, width, dtype=torch.int64)
    for request, length in enumerate(lengths.tolist()):
        for i in range(length):
            tokens[request, i] = torch.multinomial(probs[request, i], 1, generator=generator)
    signals = draft_signals(probs, tokens)
    return Draft(tokens, tuple(lengths.tolist()), probs, signals)


drafts = st.builds(random_draft, st.integers(1, 12), st.integers(1, 5), seed=st.integers(0, 10**6))


@property_test
@given(drafts, st.integers(0, 3))
def test_the_published_form_selects_the_most_likely_tokens_of_the_batch(draft, extra):
    width = draft.tokens.shape[1]
    plan = create("tetris-published", width, extra=extra).select(draft, None)
    products = {
        (b, i): math.prod(draft.signals.token_probs[b, : i + 1].tolist())
        for b, length in enumerate(draft.lengths)
        for i in range(length)
    }
    capacity = max(1, width - extra) * sum(length > 0 for length in draft.lengths)
    chosen = {(b, i) for b, length in enumerate(plan.lengths) for i in range(length)}
    assert len(chosen) == min(capacity, len(products))
    dropped = [value for place, value in products.items() if place not in chosen]
    assert min((products[place] for place in chosen), default=1) >= max(dropped, default=0) - 1e-7
    for b, length in enumerate(plan.lengths):
        assert torch.equal(plan.proposals[b, :length], draft.probs[b, :length])
        assert not plan.proposals[b, length:].any()


def test_ties_select_prefixes():
    probs = torch.zeros(3, 4, 2)
    probs[:, :3, 0] = 1.0
    tokens = torch.zeros(3, 3, dtype=torch.int64)
    draft = Draft(tokens, (3, 3, 3), probs, draft_signals(probs, tokens))
    assert create("tetris-published", 3, extra=1).select(draft, None).lengths == (3, 3, 0)


@property_test
@given(drafts, st.floats(0.0, 1.0))
def test_the_lossless_form_filters_the_whole_vocabulary(draft, threshold):
    width = draft.tokens.shape[1]
    plan = create("tetris", width, threshold).select(draft, None)
    assert bool((plan.proposals <= draft.probs).all())
    for b, (length, drafted) in enumerate(zip(plan.lengths, draft.lengths, strict=True)):
        assert length <= drafted
        before = 1.0
        for i in range(drafted):
            q = draft.probs[b, i]
            unambiguous = (before * q - threshold).abs() > 1e-6
            expected = q * (before * q >= threshold)
            assert torch.equal(plan.proposals[b, i][unambiguous], expected[unambiguous])
            drawn = draft.tokens[b, i]
            # The drawn token affects the length only through its probability.
            assert (plan.proposals[b, i, drawn] > 0) == (i < length) or i > length
            before *= float(q[drawn])
        assert not plan.proposals[b, drafted:].any()


def test_the_threshold_does_not_depend_on_other_requests_of_the_step():
    policy, other = create("tetris", 4, 0.1), create("tetris", 4, 0.1)
    first = random_draft(8, 4, seed=1)
    alone = Draft(
        first.tokens[:1],
        first.lengths[:1],
        first.probs[:1],
        draft_signals(first.probs[:1], first.tokens[:1]),
    )
    assert torch.equal(
        policy.select(first, None).proposals[:1], other.select(alone, None).proposals
    )


def test_the_first_step_verifies_everything_and_learns_the_quantile():
    policy = create("tetris", 4, extra=2)
    draft = random_draft(30, 4)
    assert policy.threshold == 0
    assert policy.select(draft, None).lengths == draft.lengths
    products = draft.signals.token_probs.cumprod(dim=1)
    num_kept = int((products >= policy.threshold * (1 - 1e-6)).sum())
    assert num_kept == 2 * sum(length > 0 for length in draft.lengths)


@pytest.mark.parametrize("num_requests", [1, 30])
def test_the_capacity_is_met_on_average(num_requests):
    policy = create("tetris", 4, extra=2)
    kept = capacity = 0
    for seed in range(400):
        draft = random_draft(num_requests, 4, seed=seed)
        length = sum(policy.select(draft, None).lengths)
        if seed >= 100:
            kept += length
            capacity += min(2 * sum(n > 0 for n in draft.lengths), sum(draft.lengths))
    assert kept == pytest.approx(capacity, rel=0.06)


def test_greedy_batches_have_no_proposals():
    draft = random_draft(4, 3)
    greedy = Draft(draft.tokens, draft.lengths, None, draft.signals)
    for name in ("tetris", "tetris-published"):
        plan = create(name, 3).select(greedy, None)
        assert plan.proposals is None
        assert plan.lengths == create(name, 3).select(draft, None).lengths


@pytest.mark.parametrize("name", ["tetris", "tetris-published"])
def test_an_empty_draft(name):
    policy = create(name, 3)
    assert lengths_of(policy, [RequestState(5, 1, 0)]) == [0]
    tokens = torch.zeros(1, 0, dtype=torch.int64)
    assert policy.select(Draft(tokens, (0,), None), None).lengths == (0,)


@dataclass(frozen=True)
class Planned(Speculation):
    """Drafts with a policy that selects the tokens to verify."""

    policy_name: str = "tetris"
    threshold: float = 0.0

    def draft_batch(self, tokens, limits=None):
        assert limits is None
        width = tokens.shape[1]
        probs = self.draft.along(tokens)
        probs[:, width] = 0
        draft = Draft(
            tokens,
            (width,) * len(tokens),
            probs,
            draft_signals(probs, tokens),
        )
        if self.policy_name == "tetris":
            policy = create("tetris", width, self.threshold)
        else:
            policy = create(self.policy_name, width, extra=1)
        plan = policy.select(draft, None)
        lengths = torch.tensor(plan.lengths)
        return DraftBatch(self.target.along(tokens), plan.proposals, tokens, lengths)


def planned(seed, threshold, vocab, width, name="tetris"):
    generator = torch.Generator().manual_seed(seed)
    tree = integer_tree if seed % 2 else random_tree
    draft = tree(vocab, width, generator)
    target = tree(vocab, width + 1, generator)
    return Planned(target, draft, keep_all(draft), policy_name=name, threshold=threshold)


@pytest.mark.slow
@settings(property_test, max_examples=30)
@given(
    st.integers(0, 10**6),
    st.floats(0.0, 1.0),
    st.sampled_from([(2, 1), (5, 1), (3, 2), (4, 2), (2, 3)]),
    st.sampled_from(["token", "block"]),
)
def test_the_lossless_form_keeps_the_targets_distribution(seed, threshold, shape, method):
    speculation = planned(seed, threshold, *shape)
    law = exact_law(speculation, partial(accept, method=method))
    assert total_variation(law.joint, speculation.target.joint()) < 1e-9


@pytest.mark.parametrize("method", ["token", "block"])
def test_the_published_form_changes_the_distribution(method):
    """The batch consists of all possible drafts."""
    speculation = planned(4, 0.0, 3, 2, "tetris-published")
    law = exact_law(speculation, partial(accept, method=method))
    assert total_variation(law.joint, speculation.target.joint()) > 0.01
