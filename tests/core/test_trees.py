"""Token trees: shapes, and the law in closed form over random trees."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.trees import ROOT, accept_drawn_path, check_parents

from ..refusals import error_of

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


def test_parents_must_come_first():
    for parents in [[0], [-1, 1], [-2], [-1, 0, 2]]:
        error_of(
            check_parents, parents, error=ValueError, match=r"parents\[\d\] must be between -1 and"
        )


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
