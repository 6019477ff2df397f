"""Token trees: shapes, and both laws in closed form over random trees."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.rejection import accept
from draftwise.core.trees import (
    ROOT,
    accept_drawn_path,
    accept_sampled_path,
    check_parents,
    child_acceptance,
    draw_children,
    follow_drawn_children,
)

property_test = settings(deadline=None, derandomize=True, max_examples=40)
VOCAB = 4


@st.composite
def parent_lists(draw, max_nodes=7):
    count = draw(st.integers(0, max_nodes))
    return [draw(st.integers(-1, node - 1)) for node in range(count)]


def path_to(parents, node):
    path = []
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path


def random_distribution(generator, p_zero=0.3):
    weights = torch.rand(VOCAB, generator=generator, dtype=torch.float64)
    weights *= torch.rand(VOCAB, generator=generator) >= p_zero
    weights[int(torch.randint(VOCAB, (1,), generator=generator))] += 0.1
    return weights / weights.sum()


class Language:
    """A random distribution of the next token after each text."""

    def __init__(self, seed):
        self._generator = torch.Generator().manual_seed(seed)
        self._known = {}

    def after(self, text):
        if tuple(text) not in self._known:
            self._known[tuple(text)] = random_distribution(self._generator)
        return self._known[tuple(text)]

    def probability(self, text):
        result = 1.0
        for end, token in enumerate(text):
            result *= float(self.after(text[:end])[token])
        return result


@property_test
@given(parent_lists())
def test_parents_that_come_first_are_accepted(parents):
    check_parents(parents)


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-2], [-1, 0, 2]])
def test_parents_must_come_first(parents):
    with pytest.raises(ValueError, match=r"parents\[\d\] must be between -1 and"):
        check_parents(parents)


@property_test
@given(parent_lists(max_nodes=5), st.integers(0, 10**6), st.integers(0, 5))
def test_a_path_drawn_by_the_target_has_its_distribution(parents, seed, unverified):
    """Enumerates what is drawn at every node; the tree's tokens are arbitrary."""
    generator = torch.Generator().manual_seed(seed)
    target, count = Language(seed), len(parents)
    tokens = torch.randint(VOCAB, (count,), generator=generator).tolist()
    verified = max(0, count - unverified)
    texts = [[tokens[i] for i in path_to(parents, node)] for node in range(count)]
    drawn = torch.tensor(list(itertools.product(range(VOCAB), repeat=verified + 1)))
    drawn = torch.nn.functional.pad(drawn, (0, count - verified))
    weights = torch.ones(len(drawn), dtype=torch.float64)
    for column, text in enumerate([[], *texts[:verified]]):
        weights *= target.after(text)[drawn[:, column]]
    several = len(drawn)
    result = accept_drawn_path(
        torch.tensor([tokens] * several).view(several, count),
        torch.tensor([parents] * several).view(several, count),
        torch.full((several,), verified),
        drawn,
    )
    found = {}
    for row in range(several):
        nodes = result.nodes[row, : result.num_accepted[row]].tolist()
        text = (*(tokens[node] for node in nodes), int(result.next_tokens[row]))
        found[text] = found.get(text, 0.0) + float(weights[row])
    assert sum(found.values()) == pytest.approx(1, abs=1e-9)
    for text, probability in found.items():
        assert probability == pytest.approx(target.probability(text), abs=1e-9)


def emitted(target, draft, text, widths, one_hot, law=child_acceptance):
    """Closed form: probability of every text of ``len(widths) + 1`` tokens that is emitted.

    Each node at depth d draws ``widths[d]`` children. ``one_hot`` may propose a token with
    certainty before them. Where the path ends early, the target goes on alone.
    """
    if not widths:
        return {(x,): float(target.after(text)[x]) for x in range(VOCAB)}
    result = {}

    def add(first, probability, inner_widths):
        if probability <= 0:
            return
        rest = emitted(target, draft, [*text, first], inner_widths, one_hot, law)
        for tail, inner in rest.items():
            key = first, *tail
            result[key] = result.get(key, 0.0) + probability * inner

    def alone(first, probability):
        """The path ended: the rest has the target's distribution."""
        if probability <= 0:
            return
        for tail in itertools.product(range(VOCAB), repeat=len(widths)):
            rest = target.probability([*text, first, *tail]) / target.probability([*text, first])
            key = first, *tail
            result[key] = result.get(key, 0.0) + probability * rest

    def test(p, q, rank, probability):
        if probability <= 0:
            return
        if rank == widths[0] or float(q.sum()) == 0:
            for token in range(VOCAB):
                alone(token, probability * float(p[0, token]))
            return
        for token in range(VOCAB):
            chance = float(q[0, token]) / float(q.sum())
            if chance > 0:
                step(p, q, token, False, rank, probability * chance)

    def step(p, q, token, certain, rank, probability):
        acceptance, left, own = law(p, q, torch.tensor([token]), torch.tensor([certain]))
        # A later child has fewer descendants: what is drafted below may depend on the rank.
        below = widths[1:] if rank < 1 else widths[1:-1]
        reached = probability * float(acceptance[0])
        if len(below) == len(widths) - 1:
            add(token, reached, below)
        else:
            ended_early(token, reached, below)
        test(left, own, rank + (not certain), probability * (1 - float(acceptance[0])))

    def ended_early(first, probability, below):
        if probability <= 0:
            return
        rest = emitted(target, draft, [*text, first], below, one_hot, law)
        for tail, inner in rest.items():
            for last in range(VOCAB):
                key = (first, *tail, last)
                chance = float(target.after([*text, first, *tail])[last])
                result[key] = result.get(key, 0.0) + probability * inner * chance

    p, q = target.after(text).unsqueeze(0), draft.after(text).unsqueeze(0)
    copied = one_hot(text)
    if copied is None:
        test(p, q, 0, 1.0)
    else:
        step(p, q, copied, True, 0, 1.0)
    return result


widths_of_trees = st.lists(st.integers(1, 3), min_size=1, max_size=2)


def total_variation(target, found, length):
    texts = itertools.product(range(VOCAB), repeat=length)
    return sum(abs(found.get(text, 0.0) - target.probability(list(text))) for text in texts) / 2


@property_test
@given(st.integers(0, 10**6), widths_of_trees, st.booleans())
def test_children_drawn_by_the_draft_keep_the_targets_distribution(seed, widths, copies):
    target, draft = Language(seed), Language(seed + 1)

    def one_hot(text):
        return (sum(text) + seed) % VOCAB if copies and (len(text) + seed) % 2 else None

    found = emitted(target, draft, [], widths, one_hot)
    assert total_variation(target, found, len(widths) + 1) < 1e-9


def leaves_q_as_it_is(p, q, child, is_one_hot):
    """Wrong: q loses the rejected child, and is not normalised again."""
    acceptance, left, _ = child_acceptance(p, q, child, is_one_hot)
    return acceptance, left, q.scatter(1, child.unsqueeze(1), 0.0)


def keeps_p(p, q, child, is_one_hot):
    """Wrong: p is not replaced by the residual."""
    acceptance, _, own = child_acceptance(p, q, child, is_one_hot)
    return acceptance, p, own


def drops_child_only(p, q, child, is_one_hot):
    """Wrong: the residual only loses the rejected child, as if it were proposed with certainty."""
    acceptance, _, own = child_acceptance(p, q, child, is_one_hot)
    left = p.scatter(1, child.unsqueeze(1), 0.0)
    return acceptance, left / left.sum(), own


def skips_a_token(p, q, child, is_one_hot):
    """Wrong: a child is left out because of the token that was drawn."""
    acceptance, left, own = child_acceptance(p, q, child, is_one_hot)
    if int(child) == 0:
        return torch.zeros(1), p, own
    return acceptance, left, own


@pytest.mark.parametrize("law", [leaves_q_as_it_is, keeps_p, drops_child_only, skips_a_token])
def test_wrong_laws_are_detected(law):
    worst = 0.0
    for seed in range(5):
        target, draft = Language(seed), Language(seed + 1)
        found = emitted(target, draft, [], [2], lambda text: None, law)
        worst = max(worst, total_variation(target, found, 2))
    assert worst > 0.01


def test_wide_trees_accept_more():
    """More children raise the probability that one of them is accepted."""
    target, draft = Language(3), Language(4)
    p, q = target.after([]).unsqueeze(0), draft.after([]).unsqueeze(0)

    def accepted(p, q, left):
        if not left or float(q.sum()) == 0:
            return 0.0
        total = 0.0
        for token in range(VOCAB):
            chance = float(q[0, token])
            if chance > 0:
                each, after, own = child_acceptance(
                    p, q, torch.tensor([token]), torch.tensor([False])
                )
                rest = accepted(after, own, left - 1)
                total += chance * (float(each[0]) + (1 - float(each[0])) * rest)
        return total

    one, two, three = (accepted(p, q, count) for count in (1, 2, 3))
    assert one == pytest.approx(float(torch.minimum(p, q).sum()))
    assert one < two < three


@property_test
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4))
def test_a_chain_is_accepted_as_by_the_law_of_chains(seed, batch, width):
    generator = torch.Generator().manual_seed(seed)
    double = {"generator": generator, "dtype": torch.float64}
    p = torch.stack([random_distribution(generator) for _ in range(batch * (width + 1))])
    q = torch.stack([random_distribution(generator) for _ in range(batch * (width + 1))])
    q = q.view(batch, width + 1, VOCAB)
    tokens = torch.multinomial(q[:, :width].reshape(-1, VOCAB), 1, generator=generator)
    tokens = tokens.view(batch, width)
    lengths = torch.randint(0, width + 1, (batch,), generator=generator)
    accept_uniforms = torch.rand(batch, width, **double)
    final = torch.rand(batch, **double)
    parents = torch.arange(-1, width - 1).expand(batch, -1)
    dense = p.view(batch, width + 1, VOCAB)
    found = accept_sampled_path(tokens, parents, lengths, dense, q, accept_uniforms, final)
    packed = torch.cat([dense[row, : lengths[row] + 1] for row in range(batch)])
    proposals = q.clone()
    proposals[torch.arange(batch), lengths] = 0.0
    expected = accept(packed, proposals, tokens, lengths, accept_uniforms, final, method="token")
    assert torch.equal(found.num_accepted, expected.num_accepted)
    assert torch.equal(found.next_tokens, expected.next_tokens)
    for row, count in enumerate(found.num_accepted.tolist()):
        assert found.nodes[row].tolist() == [*range(count), *[ROOT] * (width - count)]


def test_the_walk_tests_children_in_their_order():
    """The first child is rejected, its descendant is not tested, the second one is accepted."""
    tokens = torch.tensor([[0, 3, 1, 2]])
    parents = torch.tensor([[-1, 0, -1, 2]])
    probs = torch.eye(4, dtype=torch.float64)[[1, 0, 0, 2, 3]].unsqueeze(0)
    q = torch.full((1, 5, 4), 0.25, dtype=torch.float64)
    zeros = torch.zeros(1, 4, dtype=torch.float64)
    found = accept_sampled_path(tokens, parents, torch.tensor([4]), probs, q, zeros, zeros[:, 0])
    assert found.nodes.tolist() == [[2, 3, ROOT, ROOT]]
    assert found.next_tokens.tolist() == [3]
    cut = accept_sampled_path(tokens, parents, torch.tensor([3]), probs, q, zeros, zeros[:, 0])
    assert cut.nodes.tolist() == [[2, ROOT, ROOT, ROOT]]
    assert cut.next_tokens.tolist() == [2]


def test_children_are_drawn_without_replacement():
    q = torch.tensor([[0.5, 0.0, 0.3, 0.2], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(4)
    num_draws = 2000
    for _ in range(num_draws):
        uniforms = torch.rand(2, 3, generator=generator, dtype=torch.float64)
        children = draw_children(q, uniforms)
        assert sorted(children[0].tolist()) == [0, 2, 3]
        assert children[1].tolist() == [0, -1, -1]
        counts[children[0, 1]] += 1
    # P(second child) by enumeration of the first.
    expected = torch.zeros(4)
    for first, second in itertools.permutations((0, 2, 3), 2):
        expected[second] += q[0, first] * q[0, second] / (1 - q[0, first])
    assert torch.allclose(counts / num_draws, expected, atol=0.05)


@property_test
@given(parent_lists(), st.integers(0, 10_000), st.booleans())
def test_one_tree_is_followed_like_a_batch_of_them(parents, seed, with_copied):
    generator = torch.Generator().manual_seed(seed)
    count = len(parents)
    tokens = torch.randint(VOCAB, (1, count), generator=generator)
    probs = torch.stack([random_distribution(generator) for _ in range(count + 1)])
    by_parent = torch.stack([random_distribution(generator) for _ in range(count + 1)])
    uniforms = torch.rand(1, count, generator=generator, dtype=torch.float64)
    final = torch.rand(1, generator=generator, dtype=torch.float64)
    # First children may be copied.
    copied = [with_copied and parents.index(each) == node for node, each in enumerate(parents)]
    copied = [own and float(u) < 0.7 for own, u in zip(copied, uniforms[0].flip(0), strict=True)]
    expected = accept_sampled_path(
        tokens,
        torch.tensor([parents], dtype=torch.long).view(1, -1),
        torch.tensor([count]),
        probs.unsqueeze(0),
        by_parent.unsqueeze(0),
        uniforms,
        final,
        torch.tensor([copied]).view(1, -1),
    )
    path, following = follow_drawn_children(
        tokens[0].tolist(),
        parents,
        lambda node: probs[node + 1],
        lambda node: None if copied[node] else by_parent[parents[node] + 1],
        uniforms[0].tolist(),
        float(final),
    )
    assert path == expected.nodes[0, : len(path)].tolist()
    assert len(path) == int(expected.num_accepted)
    assert following == int(expected.next_tokens)


def test_what_is_left_of_a_sure_draft_is_normalised():
    """Also where its other tokens have less mass than float32 has normal numbers."""
    q = torch.tensor([[1.0, 1e-33, 3e-33, 0.0], [1.0, 1e-42, 3e-42, 0.0]])
    p = torch.tensor([[0.1, 0.3, 0.6, 0.0]]).repeat(2, 1)
    none = torch.zeros(2, dtype=torch.bool)
    acceptance, left, rest = child_acceptance(p, q, torch.tensor([0, 0]), none)
    assert acceptance.tolist() == pytest.approx([0.1, 0.1])
    assert torch.allclose(rest[0], torch.tensor([0.0, 0.25, 0.75, 0.0]))
    assert torch.allclose(rest.sum(dim=1), torch.ones(2))
    second, _, _ = child_acceptance(left, rest, torch.tensor([1, 1]), none)
    assert second.tolist() == pytest.approx([1.0, 1.0])


def test_a_residual_that_rounding_empties_is_the_target():
    p = torch.tensor([[0.0, 0.25, 0.75]])
    one_hot = torch.zeros(1, dtype=torch.bool)
    _, left, _ = child_acceptance(p, p.clone(), torch.tensor([1]), one_hot)
    assert torch.equal(left, p)
