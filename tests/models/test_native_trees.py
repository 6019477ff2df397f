"""The kernels of token trees decide like PyTorch's operations."""

import pytest
import torch

from draftwise.core.random import StageUniforms, StepUniforms
from draftwise.core.rejection import sample
from draftwise.core.sampling import LogitControls, probabilities
from draftwise.core.types import Plan
from draftwise.engine.tree_paths import accepted_nodes, path_rows
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.trees import accept_trees, describe_nodes

pytestmark = pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")

NODES = 9
FILTERS = {"none": {}, "top-k": {"top_k": 7}, "top-p": {"top_p": 0.8}, "min-p": {"min_p": 0.05}}


class Forest:
    """Random trees of sampled and of greedy requests."""

    def __init__(self, seed, vocab, filters="none", batch=6):
        self.generator = generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, NODES + 1, (batch,), generator=generator).tolist()
        rows = sum(lengths) + batch
        self.logits = torch.randn(rows, vocab, generator=generator) * 2
        self.logits[:, :6] += 5.0  # the tokens of the trees
        temperature = 0.5 + torch.rand(batch, generator=generator)
        temperature[::3] = 0.0
        own = {name: torch.full((batch,), value) for name, value in FILTERS[filters].items()}
        self.controls = LogitControls(temperature, False, True, **own)
        tokens = torch.randint(0, min(vocab, 6), (batch, NODES), generator=generator)
        parents = torch.stack(
            [torch.randint(-1, max(n, 0), (batch,), generator=generator) for n in range(NODES)],
            dim=1,
        )
        self.plan = Plan(tokens, tuple(lengths), None, parents=parents)
        numbers = [self._numbers(batch, NODES) for _ in range(3)]
        self.uniforms = StepUniforms(
            numbers[0],
            numbers[1].float(),
            self._numbers(batch, 1)[:, 0],
            numbers[2],
            StageUniforms(numbers[1].float(), numbers[0]),
        )

    def _numbers(self, *shape):
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def ours(self):
        library = native_library()
        return accept_trees(library, self.logits, self.controls, self.plan, self.uniforms)

    def theirs(self):
        """By the reference functions, which read the distributions at all nodes."""
        owners, paths = path_rows(self.plan)
        p = probabilities(self.logits, self.controls.rows(torch.tensor(owners)))
        numbers = [self.uniforms.final.unsqueeze(1), self.uniforms.following]
        depths = torch.tensor([len(path) for path in paths])
        final = torch.cat(numbers, dim=1)[torch.tensor(owners), depths]
        return accepted_nodes(self.plan, sample(p, final).tolist())


@pytest.mark.covering("filters", "vocab")
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", [5, 37, 700])
def test_trees_accept_what_the_reference_accepts(vocab, filters):
    accepted = num_other = 0
    for seed in range(60):
        forest = Forest(seed, vocab, filters)
        nodes, following, is_nan = forest.ours()
        num_other += (nodes, following) != forest.theirs()
        assert not any(is_nan)
        accepted += sum(map(len, nodes))
    assert accepted > 60
    # A random number may lie where the sums of both differ by rounding.
    assert num_other <= 1


def test_only_nodes_that_are_reached_make_a_request_fail():
    forest = Forest(3, 5)
    nodes, following, _ = forest.ours()
    first = 0
    for request, length in enumerate(forest.plan.lengths):
        for node in range(-1, length):
            right = forest.logits[first + 1 + node].clone()
            forest.logits[first + 1 + node, 3] = float("nan")
            paths = forest.ours()
            reached = node == -1 or node in nodes[request]
            assert paths.is_nan == [each == request and reached for each in range(6)]
            if not reached:
                assert (paths.nodes, paths.next_tokens) == (nodes, following)
            forest.logits[first + 1 + node] = right
        first += length + 1


def test_nodes_have_likely_tokens():
    for wants_entropy in [True, False]:
        for vocab in [4, 33, 1000]:
            generator = torch.Generator().manual_seed(1)
            logits = torch.randn(7, vocab, generator=generator) * 2
            logits[5:, 2] = float("nan")
            temperature = torch.tensor([0.0, 0.7, 1.3])
            controls = LogitControls(temperature, False, True, top_k=torch.full((3,), 2))
            owner = torch.tensor([0, 1, 2, 0, 1, 0, 2])
            width = min(5, vocab)
            found = describe_nodes(native_library(), logits, controls, owner, width, wants_entropy)
            scale = torch.where(temperature > 0, temperature, 1.0)[owner].unsqueeze(1)
            soft = (logits / scale).softmax(dim=1)
            probs, tokens = soft[:5].topk(width)
            assert torch.equal(found.tokens[:5], tokens), wants_entropy
            assert torch.allclose(found.probs[:5], probs, rtol=1e-4), wants_entropy
            assert not found.probs[5:].any(), wants_entropy
            if wants_entropy:
                entropy = torch.special.entr(soft).sum(dim=1).nan_to_num(nan=0.0)
                assert torch.allclose(found.entropy, entropy, atol=1e-4), wants_entropy
            else:
                assert found.entropy is None, wants_entropy
