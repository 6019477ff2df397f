"""For any filter and any draft length, the output has the target's distribution.

This is tested exactly, by computing the law of the code under test, and by statistics of many
simulated requests. Each kind of test is also applied to wrong rules, and must detect them.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.rejection import accept, sample

from .speculation import (
    Speculation,
    drop_by_own_acceptance,
    exact_law,
    keep_all,
    predictable_stop,
    simulate,
)
from .statistics_tools import (
    Tree,
    chi_square_p_value,
    integer_tree,
    random_tree,
    sequence_counts,
    total_variation,
)

pytestmark = pytest.mark.slow

RULES = {method: partial(accept, method=method) for method in ("token", "block")}
rules = st.sampled_from(sorted(RULES)).map(RULES.__getitem__)
both_methods = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())

# With 250 to 350 different texts, a relative deviation of 5% (root mean square over texts) gives
# a p-value below 1e-4 with a probability above 0.9.
NUM_REQUESTS = 60_000
NOT_UNLIKELY = 1e-4
IMPOSSIBLE = 1e-6


def wrong_resampling(p, proposals, tokens, lengths, accept_uniforms, final_uniforms):
    """Accepts with min(1, p/q) and draws the corrected token from p, not from the residual."""
    accepted = accept(
        p, proposals, tokens, lengths, accept_uniforms, final_uniforms, method="token"
    )
    row = (lengths + 1).cumsum(0) - (lengths + 1) + accepted.num_accepted
    return accepted._replace(next_tokens=sample(p[row], final_uniforms))


def block_with_token_residual(p, proposals, tokens, lengths, accept_uniforms, final_uniforms):
    """Accepts as block verification does and corrects as token verification does."""
    arguments = (p, proposals, tokens, lengths, accept_uniforms, final_uniforms)
    accepted = accept(*arguments, method="block")
    num_accepted = accepted.num_accepted
    row = (lengths + 1).cumsum(0) - (lengths + 1) + num_accepted
    proposal = proposals[torch.arange(len(tokens)), num_accepted]
    residual = (p[row] - proposal).clamp(min=0)
    return accepted._replace(next_tokens=sample(residual, final_uniforms))


def one_number_for_everything(p, proposals, tokens, lengths, accept_uniforms, final_uniforms):
    """Draws the last token with the number that decided the first acceptance."""
    return accept(
        p, proposals, tokens, lengths, accept_uniforms, accept_uniforms[:, 0], method="token"
    )


def lenient(p, proposals, tokens, lengths, accept_uniforms, final_uniforms):
    """Accepts with too high a probability."""
    return accept(
        p,
        proposals,
        tokens,
        lengths,
        accept_uniforms,
        final_uniforms,
        lenience=torch.full_like(final_uniforms, 0.7),
    )


WRONG_RULES = {
    "resampling from p": wrong_resampling,
    "block with token residual": block_with_token_residual,
    "one number for everything": one_number_for_everything,
    "lenience 0.7": lenient,
}


def random_filter(draft, p_drop, generator):
    """A random filter: keep or drop each token of each prefix."""
    return tuple(
        torch.rand(table.shape, generator=generator) >= p_drop for table in draft.conditionals
    )


@st.composite
def speculations(draw, filtered=True):
    vocab, width = draw(st.sampled_from([(2, 1), (6, 1), (3, 2), (5, 2), (2, 3), (3, 3), (2, 4)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))

    def tree(depth):
        if draw(st.booleans()):
            return integer_tree(vocab, depth, generator)
        sharpness = draw(st.sampled_from([0.3, 1.0, 3.0]))
        return random_tree(vocab, depth, generator, sharpness, draw(st.sampled_from([0.0, 0.4])))

    draft = tree(width)
    keep = keep_all(draft)
    if filtered:
        p_stop = draw(st.sampled_from([0.0, 0.3]))
        p_drop = draw(st.sampled_from([0.0, 0.2, 0.7]))
        stop = predictable_stop(draft, p_stop, generator)
        kept = random_filter(draft, p_drop, generator)
        keep = tuple(a & b for a, b in zip(stop, kept, strict=True))
        if draw(st.booleans()):
            threshold = draw(st.floats(0.1, 0.95))
            own = drop_by_own_acceptance(draft, tree(width), threshold)
            keep = tuple(a & b for a, b in zip(keep, own, strict=True))
    return Speculation(tree(width + 1), draft, keep)


exact_test = settings(deadline=None, derandomize=True, max_examples=80)


@exact_test
@given(speculations(), rules)
def test_exactly_the_target_distribution(speculation, rule):
    law = exact_law(speculation, rule)
    assert total_variation(law.joint, speculation.target.joint()) < 1e-9


@settings(exact_test, max_examples=25)
@given(speculations(), rules)
def test_the_target_distribution_within_rounding_in_float32(speculation, rule):
    law = exact_law(speculation, rule, dtype=torch.float32)
    assert total_variation(law.joint, speculation.target.joint()) < 1e-5


@settings(exact_test, max_examples=40)
@given(speculations())
def test_block_verification_accepts_at_least_as_much(speculation):
    token = exact_law(speculation, RULES["token"]).num_accepted
    block = exact_law(speculation, RULES["block"]).num_accepted
    assert block >= token - 1e-9
    if speculation.draft.depth == 1:
        assert block == pytest.approx(token, abs=1e-9)


@settings(exact_test, max_examples=40)
@given(speculations())
def test_expected_number_of_accepted_tokens(speculation):
    """The sum over prefixes: of Π min(p, q′) for token, of q′(prefix)·p_i(prefix) for block."""
    target, proposals = speculation.target.conditionals, speculation.proposals().conditionals
    joint_p = joint_q = both = torch.ones(1, dtype=torch.float64)
    token = block = 0.0
    for p, q in zip(target, proposals, strict=False):
        both = (both.unsqueeze(1) * torch.minimum(p, q)).flatten()
        token += float(both.sum())
        # q′(prefix)·p_i is the minimum of q′(prefix) and q′·p_{i−1} multiplied by p.
        joint_q = (joint_q.unsqueeze(1) * q).flatten()
        joint_p = torch.minimum((joint_p.unsqueeze(1) * p).flatten(), joint_q)
        block += float(joint_p.sum())
    assert exact_law(speculation, RULES["token"]).num_accepted == pytest.approx(token)
    assert exact_law(speculation, RULES["block"]).num_accepted == pytest.approx(block)


def counterexample(passes_filter):
    """Drop if A < 0.5 with q = (½, ½) and p = c = (0.9, 0.1): b is always dropped."""
    half = Tree((torch.tensor([[0.5, 0.5]], dtype=torch.float64),))
    skewed = torch.tensor([[0.9, 0.1]], dtype=torch.float64)
    target = Tree((skewed, skewed.expand(2, 2)))
    keep = drop_by_own_acceptance(half, Tree((skewed,)), 0.5)
    return Speculation(target, half, keep, passes_filter)


@both_methods
def test_dropping_a_token_by_its_own_acceptance_biases_the_output(rule):
    def p_first(speculation):
        return float(exact_law(speculation, rule).joint.reshape(2, 2)[0].sum())

    assert p_first(counterexample(passes_filter=False)) == pytest.approx(0.95, abs=1e-9)
    assert p_first(counterexample(passes_filter=True)) == pytest.approx(0.9, abs=1e-9)


def example(vocab=4, depth=4, seed=0):
    """A target, a draft and a companion that agree about as well as trained models do."""
    generator = torch.Generator().manual_seed(seed)
    target = random_tree(vocab, depth, generator, p_zero=0.1)
    shared = random_tree(vocab, depth, generator, p_zero=0.1)

    def near(tree, share):
        pairs = zip(tree.conditionals, shared.conditionals, strict=True)
        return Tree(tuple(share * a + (1 - share) * b for a, b in pairs)[: depth - 1])

    return target, near(target, 0.5), near(target, 0.7), generator


def disagreement():
    """An unrelated target and draft, so that errors are visible."""
    generator = torch.Generator().manual_seed(7)
    target = random_tree(3, 3, generator, sharpness=0.5, p_zero=0.3)
    draft = random_tree(3, 2, generator, sharpness=0.5, p_zero=0.3)
    return Speculation(target, draft, keep_all(draft))


# The exact law can be computed only for rules that use each number once.
@pytest.mark.parametrize("name", sorted(WRONG_RULES.keys() - {"one number for everything"}))
def test_exact_law_detects_wrong_rules(name):
    speculation = disagreement()
    law = exact_law(speculation, WRONG_RULES[name])
    assert total_variation(law.joint, speculation.target.joint()) > 0.01


def p_value(speculation, rule, limits=None, seed=0, num_requests=NUM_REQUESTS):
    tokens, accepted = simulate(speculation, rule, num_requests, limits, seed)
    # Both acceptances and rejections must occur for the test to be meaningful.
    assert 0 < float(accepted.num_accepted.double().mean()) < speculation.draft.depth
    counts = sequence_counts(tokens, speculation.target.vocab)
    return chi_square_p_value(counts, speculation.target.joint())


def random_stop(draft, p_stop, generator):
    """A predictable stop, at the second drafted token at the earliest."""
    first, *later = predictable_stop(draft, p_stop, generator)
    return torch.ones_like(first), *later


def fixed_length(draft, companion, generator):
    return keep_all(draft), None


def independent_lengths(draft, companion, generator):
    return keep_all(draft), torch.randint(draft.depth + 1, (NUM_REQUESTS,), generator=generator)


def stop_at_earlier_tokens(draft, companion, generator):
    return random_stop(draft, 0.35, generator), None


def filter_by_own_acceptance(draft, companion, generator):
    return drop_by_own_acceptance(draft, companion, 0.8), None


def filter_by_own_probability(draft, companion, generator):
    return tuple(table > 0.15 for table in draft.conditionals), None


def everything_at_once(draft, companion, generator):
    stop = random_stop(draft, 0.15, generator)
    own = drop_by_own_acceptance(draft, companion, 0.7)
    limits = torch.randint(1, draft.depth + 1, (NUM_REQUESTS,), generator=generator)
    return tuple(a & b for a, b in zip(stop, own, strict=True)), limits


WAYS_TO_CUT = [
    fixed_length,
    independent_lengths,
    stop_at_earlier_tokens,
    filter_by_own_acceptance,
    filter_by_own_probability,
    everything_at_once,
]


@pytest.mark.covering("cut", "shape", "rule")
@both_methods
@pytest.mark.parametrize("shape", [(4, 4), (7, 3)], ids=["4 tokens deep", "7 tokens wide"])
@pytest.mark.parametrize("cut", WAYS_TO_CUT)
def test_simulated_requests_follow_the_target(cut, shape, rule):
    target, draft, companion, generator = example(*shape)
    keep, limits = cut(draft, companion, generator)
    assert p_value(Speculation(target, draft, keep), rule, limits) > NOT_UNLIKELY


@pytest.mark.parametrize("wrong", WRONG_RULES.values(), ids=WRONG_RULES.keys())
def test_simulation_detects_wrong_rules(wrong):
    assert p_value(disagreement(), wrong) < IMPOSSIBLE


@both_methods
@pytest.mark.parametrize("cut", [filter_by_own_acceptance, filter_by_own_probability])
def test_simulation_detects_unfiltered_dropping(cut, rule):
    """The same filter, without passing the filtered proposals to the acceptance law."""
    target, draft, companion, generator = example()
    keep, _ = cut(draft, companion, generator)
    assert p_value(Speculation(target, draft, keep, passes_filter=False), rule) < IMPOSSIBLE


@both_methods
def test_simulated_counterexample(rule):
    for passes_filter, expected in ((True, 0.9), (False, 0.95)):
        tokens, _ = simulate(counterexample(passes_filter), rule, NUM_REQUESTS)
        counts = torch.bincount(tokens[:, 0], minlength=2)
        assert chi_square_p_value(counts, [expected, 1 - expected]) > NOT_UNLIKELY
        assert (chi_square_p_value(counts, [0.9, 0.1]) < IMPOSSIBLE) == (not passes_filter)


def test_simulated_block_verification_accepts_more():
    target, draft, _, _ = example()
    speculation = Speculation(target, draft, keep_all(draft))
    mean = {}
    for name, rule in RULES.items():
        _, accepted = simulate(speculation, rule, NUM_REQUESTS)
        mean[name] = float(accepted.num_accepted.double().mean())
        # Standard error of the mean: below 1.5 / sqrt(60,000) = 0.0062.
        assert mean[name] == pytest.approx(exact_law(speculation, rule).num_accepted, abs=0.025)
    assert mean["block"] > mean["token"] + 0.02
