"""Staged speculation: the mid stage's text and proposals, and the target's verification."""

from functools import partial

import pytest
import torch

from draftwise.core.rejection import accept
from draftwise.core.signals import agreement, overlap, token_probabilities
from draftwise.core.types import CompanionScores, Draft
from draftwise.policies import PolicyContext, RequestState, create_policy

from ..core.speculation import DraftBatch, uniforms_for
from ..core.statistics_tools import chi_square_p_value, prefix_codes, random_tree, sequence_counts
from ..stand_ins import draft_signals
from .driving import lengths_of

NUM_REQUESTS = 100_000
VOCAB, WIDTH = 3, 2
NOT_UNLIKELY = 1e-4


def staged(greedy, gamma=WIDTH):
    policy = create_policy("staged", PolicyContext(gamma, has_companion=True), {})
    lengths_of(policy, [RequestState(5, 1, gamma, i, each) for i, each in enumerate(greedy)])
    return policy


def companion_scores(c, draft):
    c_drawn = token_probabilities(c, draft.tokens)
    signals = draft.signals
    return CompanionScores(
        c, overlap(signals.draft_probs, c), agreement(signals.token_probs, c_drawn)
    )


def drawn(tree, uniforms):
    """``[n, width]`` tokens drawn from a tree."""
    tokens = torch.zeros(len(uniforms), tree.depth, dtype=torch.int64)
    for i, table in enumerate(tree.conditionals):
        rows = table[prefix_codes(tokens[:, :i], tree.vocab)[:, -1]]
        tokens[:, i] = (rows.cumsum(dim=1) < uniforms[:, i : i + 1]).sum(dim=1)
    return tokens.clamp(max=tree.vocab - 1)


@pytest.fixture(scope="module")
def simulated():
    """Target tree, mid tree, the draft and the plan of many requests."""
    generator = torch.Generator().manual_seed(3)
    target = random_tree(VOCAB, WIDTH + 1, generator)
    draft_tree = random_tree(VOCAB, WIDTH, generator)
    mid = random_tree(VOCAB, WIDTH, generator)
    uniforms = uniforms_for(NUM_REQUESTS, WIDTH)
    tokens = drawn(draft_tree, uniforms.draft)
    probs = draft_tree.along(tokens)
    probs[:, WIDTH] = 0
    draft = Draft(
        tokens,
        (WIDTH,) * NUM_REQUESTS,
        probs,
        draft_signals(probs, tokens),
        uniforms.stage,
    )
    plan = staged([False] * NUM_REQUESTS).select(
        draft, companion_scores(mid.along(tokens)[:, :WIDTH], draft)
    )
    return target, mid, draft, plan


def test_the_mid_stages_text_has_the_mid_models_distribution(simulated):
    _, mid, draft, plan = simulated
    lengths = torch.tensor(plan.lengths)
    num_own = torch.tensor(plan.num_own)
    assert bool(((lengths == num_own + 1) | ((lengths == WIDTH) & (num_own == WIDTH))).all())
    assert bool((lengths >= 1).all())
    first = torch.bincount(plan.tokens[:, 0], minlength=VOCAB)
    assert chi_square_p_value(first, mid.conditionals[0][0]) > NOT_UNLIKELY
    # After each accepted first token, the second token has the mid model's distribution too.
    for token in range(VOCAB):
        continued = (num_own >= 1) & (plan.tokens[:, 0] == token)
        assert torch.equal(plan.tokens[continued, 0], draft.tokens[continued, 0])
        second = torch.bincount(plan.tokens[continued, 1], minlength=VOCAB)
        assert chi_square_p_value(second, mid.conditionals[1][token]) > NOT_UNLIKELY


def test_proposals_are_the_mid_models_distributions(simulated):
    _, mid, _, plan = simulated
    c = mid.along(plan.tokens)
    for length in (1, WIDTH):
        chosen = torch.tensor(plan.lengths) == length
        assert bool(chosen.any())
        assert torch.equal(plan.proposals[chosen, :length], c[chosen, :length])
        assert not plan.proposals[chosen, length:].any()
        assert not plan.tokens[chosen, length:].any()


@pytest.mark.parametrize("method", ["token", "block"])
def test_the_verified_text_has_the_targets_distribution(simulated, method):
    target, _, _, plan = simulated
    uniforms = uniforms_for(NUM_REQUESTS, WIDTH)
    batch = DraftBatch(
        target.along(plan.tokens), plan.proposals, plan.tokens, torch.tensor(plan.lengths)
    )
    accepted = batch.apply(partial(accept, method=method), uniforms.accept, uniforms.final)
    verified = torch.cat([plan.tokens, torch.zeros(NUM_REQUESTS, 1, dtype=torch.int64)], dim=1)
    verified[torch.arange(NUM_REQUESTS), accepted.num_accepted] = accepted.next_tokens
    generator = torch.Generator().manual_seed(0)
    text = target.complete(verified, accepted.num_accepted + 1, generator)
    assert chi_square_p_value(sequence_counts(text, VOCAB), target.joint()) > NOT_UNLIKELY


def greedy_draft(tokens, lengths, vocab=4):
    tokens = torch.tensor(tokens)
    width = tokens.shape[1]
    probs = torch.zeros(len(tokens), width + 1, vocab)
    probs[:, :width].scatter_(2, tokens.unsqueeze(2), 1.0)
    probs[torch.arange(width + 1) >= torch.tensor(lengths).unsqueeze(1)] = 0
    draft_probs = (probs[:, :width] * 2).softmax(dim=2) * (
        probs[:, :width].sum(2, keepdim=True) > 0
    )
    return Draft(
        tokens,
        tuple(lengths),
        probs,
        draft_signals(draft_probs, tokens),
        uniforms_for(len(tokens), width).stage,
    )


def test_greedy_requests_follow_the_mid_models_most_likely_tokens():
    most_likely = torch.tensor([[0, 1, 2], [0, 3, 2], [3, 1, 2], [0, 1, 2]])
    c = torch.full((4, 3, 4), 0.2).scatter_(2, most_likely.unsqueeze(2), 0.4)
    draft = greedy_draft([[0, 1, 2]] * 4, [3, 3, 3, 2])
    c[3, 2] = 0
    expected = [[0, 1, 2], [0, 3, 0], [3, 0, 0], [0, 1, 0]]
    for probs in (draft.probs, None):
        this = Draft(draft.tokens, draft.lengths, probs, draft.signals, draft.stage_uniforms)
        plan = staged([True] * 4, 3).select(this, companion_scores(c, this))
        assert plan.tokens.tolist() == expected
        assert plan.lengths == (3, 2, 1, 2)
        assert plan.num_own == (3, 1, 0, 2)
        if probs is None:
            assert plan.proposals is None
        else:
            chosen = plan.proposals[:, :3].gather(2, plan.tokens.unsqueeze(2)).squeeze(2)
            inside = torch.arange(3) < torch.tensor(plan.lengths).unsqueeze(1)
            assert torch.equal(chosen, inside.float())
            assert torch.equal(plan.proposals.sum(dim=2)[:, :3], inside.float())


def test_nothing_is_verified_where_the_mid_model_has_no_distribution():
    draft = greedy_draft([[0, 1, 2], [0, 1, 2], [0, 0, 0]], [3, 3, 0])
    c = torch.full((3, 3, 4), 0.25)
    c[0, 1:] = 0
    c[1] = 0
    c[2] = 0
    for greedy in (True, False):
        plan = staged([greedy] * 3, 3).select(draft, companion_scores(c, draft))
        assert plan.lengths[0] <= 1
        assert plan.lengths[1:] == (0, 0)
        assert not plan.proposals[1:].any()


def test_an_empty_draft():
    tokens = torch.zeros(2, 0, dtype=torch.int64)
    assert staged([False] * 2).select(Draft(tokens, (0, 0), None), None).lengths == (0, 0)
