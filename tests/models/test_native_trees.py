"""The kernels of token trees decide and draw like PyTorch's operations."""

import pytest
import torch

from draftwise.core.random import StageUniforms, StepUniforms
from draftwise.core.rejection import sample
from draftwise.core.sampling import LogitControls, probabilities
from draftwise.core.trees import draw_children as plain_draw_children
from draftwise.core.trees import follow_drawn_children
from draftwise.core.types import Plan, TreeProbs
from draftwise.engine.tree_paths import accepted_nodes, path_rows
from draftwise.models.native.library import native_library
from draftwise.models.native.trees import accept_trees, describe_nodes, draw_children

pytestmark = pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")

NODES, WIDTH = 9, 3
FILTERS = {
    "none": {},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
}


class Forest:
    """Random trees: drawn ones with copied first children, certain ones, and greedy ones."""

    def __init__(self, seed, vocab, own_vocab=None, filters=None, batch=6):
        self.generator = generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, NODES + 1, (batch,), generator=generator).tolist()
        rows = sum(lengths) + batch
        self.logits = torch.randn(rows, vocab, generator=generator) * 2
        temperature = 0.5 + torch.rand(batch, generator=generator)
        temperature[::3] = 0.0
        self.controls = LogitControls(temperature, False, True, **self._filters(filters, batch))
        own_vocab = own_vocab or vocab
        self.ids = None
        if own_vocab < vocab:
            self.ids = torch.randperm(vocab, generator=generator)[:own_vocab]
        parts, drawn_from, tokens, parents = [], [], [], []
        first = 0
        for request, length in enumerate(lengths):
            above, own, places = [], [], []
            while len(own) < length:
                parent = -1 if not own else self._integer(-1, len(own) - 1)
                count = min(self._integer(1, WIDTH), length - len(own))
                if parent in above:
                    continue
                near = self.logits[first + 1 + parent]
                near = near if self.ids is None else near[self.ids]
                noise = torch.randn(own_vocab, generator=generator)
                q = (near + 0.7 * noise).softmax(dim=0)
                found = plain_draw_children(q[None], self._numbers(1, count))[0]
                found = found if self.ids is None else self.ids[found]
                row = sum(map(len, parts))
                parts.append(q[None])
                is_copied = self._integer(0, 2) == 0
                for rank, token in enumerate(found.tolist()):
                    places.append(-1 if is_copied and rank == 0 else row)
                    above.append(parent)
                    own.append(token)
            first += length + 1
            pad = NODES - length
            is_drawn = request % 3 == 1
            drawn_from.append(places if is_drawn else [])
            tokens.append(own + [0] * pad)
            parents.append(above + [0] * pad)
        # Two parts of several rows.
        middle = len(parts) // 2
        halves = [part for part in (parts[:middle], parts[middle:]) if part]
        self.tree_probs = TreeProbs([torch.cat(h) for h in halves], drawn_from, self.ids, vocab)
        self.plan = Plan(torch.tensor(tokens), tuple(lengths), None, parents=torch.tensor(parents))
        numbers = [self._numbers(batch, NODES) for _ in range(3)]
        self.uniforms = StepUniforms(
            numbers[0],
            numbers[1].float(),
            self._numbers(batch, 1)[:, 0],
            numbers[2],
            StageUniforms(numbers[1].float(), numbers[0]),
        )

    def _filters(self, filters, batch):
        return {
            name: torch.full((batch,), value) for name, value in FILTERS[filters or "none"].items()
        }

    def _integer(self, low, high):
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def _numbers(self, *shape):
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def ours(self):
        return accept_trees(
            native_library(),
            self.logits,
            self.controls,
            self.plan,
            self.tree_probs,
            self.uniforms,
        )

    def theirs(self):
        """By the reference functions, which read the distributions at all nodes."""
        plan, uniforms = self.plan, self.uniforms
        owners, paths = path_rows(plan)
        p = probabilities(self.logits, self.controls.rows(torch.tensor(owners)))
        final = torch.cat([uniforms.final.unsqueeze(1), uniforms.following], dim=1)
        depths = torch.tensor([len(path) for path in paths])
        nodes, following = accepted_nodes(
            plan, sample(p, final[torch.tensor(owners), depths]).tolist()
        )
        for request, length in enumerate(plan.lengths):
            if not self.tree_probs.rows[request]:
                continue
            first = owners.index(request)
            nodes[request], following[request] = follow_drawn_children(
                plan.host_tokens[request][:length],
                plan.host_parents[request],
                lambda node, first=first: p[first + 1 + node],
                lambda node, request=request: self.tree_probs.of(request, node),
                uniforms.accept[request].tolist(),
                float(uniforms.final[request]),
            )
        return nodes, following


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("vocab", "own_vocab"), [(5, None), (37, 20), (700, None), (700, 530)])
def test_trees_accept_what_the_reference_accepts(vocab, own_vocab, filters):
    accepted = 0
    for seed in range(60):
        forest = Forest(seed, vocab, own_vocab, filters)
        nodes, following, is_nan = forest.ours()
        assert (nodes, following) == forest.theirs()
        assert not any(is_nan)
        accepted += sum(map(len, nodes))
    assert accepted > 60


def test_siblings_are_tested_against_what_is_left():
    """Drafts that are nearly the target's, so that later children are accepted often."""
    later = 0
    for seed in range(200):
        forest = Forest(seed, 6, batch=4)
        nodes, following, _ = forest.ours()
        assert (nodes, following) == forest.theirs()
        for own, parents in zip(nodes, forest.plan.host_parents, strict=True):
            later += sum(parents.index(parents[node]) != node for node in own)
    assert later > 50


@pytest.mark.parametrize("smallest", [1e-33, 1e-42])
def test_what_is_left_of_a_sure_draft_is_normalised(smallest):
    """A first child that is rejected, and a second one that q has nearly no mass for."""
    q = torch.tensor([[1.0, smallest, 3 * smallest, 0.0]])
    p = torch.tensor([0.1, 0.3, 0.6, 0.0])
    plan = Plan(torch.tensor([[0, 1]]), (2,), None, parents=torch.tensor([[-1, -1]]))
    tree_probs = TreeProbs([q], [[0, 0]], None, 4)
    controls = LogitControls(torch.ones(1), False, False)
    number = torch.zeros(1, 2, dtype=torch.float64)
    # p after the first rejection has 1/3 for the second child, and q has 1/4.
    for uniform, path in ((0.99, [1]), (0.0, [0])):
        accept = torch.tensor([[max(uniform, 0.0), 0.99]])
        uniforms = StepUniforms(number, accept, number[:, 0], number, StageUniforms(accept, number))
        logits = torch.stack([p, p, p]).log()
        paths = accept_trees(native_library(), logits, controls, plan, tree_probs, uniforms)
        assert paths.nodes == [path]
    # With 1/3 of the target and 3/4 of the draft, the third token is accepted less often.
    plan = Plan(torch.tensor([[0, 2]]), (2,), None, parents=torch.tensor([[-1, -1]]))
    for uniform, path in ((0.88, [1]), (0.9, [])):
        accept = torch.tensor([[0.99, uniform]])
        uniforms = StepUniforms(number, accept, number[:, 0], number, StageUniforms(accept, number))
        paths = accept_trees(native_library(), logits, controls, plan, tree_probs, uniforms)
        assert paths.nodes == [path]


def test_only_nodes_that_are_reached_make_a_request_fail():
    forest = Forest(3, 37)
    nodes, following, _ = forest.ours()
    first = 0
    for request, length in enumerate(forest.plan.lengths):
        for node in range(-1, length):
            right = forest.logits[first + 1 + node].clone()
            forest.logits[first + 1 + node, 5] = float("nan")
            paths = forest.ours()
            reached = node == -1 or node in nodes[request]
            assert paths.is_nan == [each == request and reached for each in range(6)]
            if not reached:
                assert (paths.nodes, paths.next_tokens) == (nodes, following)
            forest.logits[first + 1 + node] = right
        first += length + 1


@pytest.mark.parametrize("vocab", [5, 300, 2000])
def test_children_are_those_of_the_reference(vocab):
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        q = (torch.randn(5, vocab, generator=generator) * 3).softmax(dim=1)
        q[1] = torch.nn.functional.one_hot(torch.tensor(3), vocab)
        q[2] = 0.0
        uniforms = torch.rand(4, 6, generator=generator, dtype=torch.float64)
        rows = [4, 1, 2, 0]
        ours = draw_children(native_library(), q, rows, uniforms)
        assert torch.equal(ours, plain_draw_children(q[rows], uniforms))
        assert ours[1].tolist() == [3, -1, -1, -1, -1, -1]
        assert ours[2].tolist() == [-1] * 6


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("wants_entropy", [True, False])
@pytest.mark.parametrize("vocab", [4, 33, 1000])
def test_nodes_have_likely_tokens_or_a_distribution(vocab, wants_entropy, filters):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, vocab, generator=generator) * 2
    logits[5:, 2] = float("nan")
    temperature = torch.tensor([0.0, 0.7, 1.3])
    own = {name: torch.full((3,), value) for name, value in FILTERS[filters].items()}
    controls = LogitControls(temperature, False, True, **own)
    owner = torch.tensor([0, 1, 2, 0, 1, 0, 2])
    q_rows = [-1, 0, 1, -1, 2, -1, 3]
    width = min(5, vocab)
    found = describe_nodes(native_library(), logits, controls, owner, q_rows, width, wants_entropy)
    q = found.q
    assert q.shape == (4, vocab)
    scale = torch.where(temperature > 0, temperature, 1.0)[owner].unsqueeze(1)
    soft = (logits / scale).softmax(dim=1)
    for row in (0, 3):
        probs, tokens = soft[row].topk(width)
        assert torch.equal(found.tokens[row], tokens)
        assert torch.allclose(found.probs[row], probs, rtol=1e-4)
    assert not found.probs[5].any()
    expected = probabilities(logits, controls.rows(owner)).nan_to_num(nan=0.0)
    for row, place in enumerate(q_rows):
        if place >= 0:
            assert torch.allclose(q[place], expected[row], rtol=1e-4, atol=1e-9)
            assert float(found.largest[row]) == pytest.approx(float(expected[row].max()), rel=1e-4)
            assert int(found.support[row]) == int((expected[row] > 0).sum())
        else:
            assert found.largest[row] == found.support[row] == 0
    if wants_entropy:
        entropy = torch.special.entr(soft).sum(dim=1).nan_to_num(nan=0.0)
        assert torch.allclose(found.entropy, entropy, atol=1e-4)
    else:
        assert found.entropy is None
