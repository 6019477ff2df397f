"""The native acceptance law makes the same decisions as the one in PyTorch."""

import pytest
import torch

from draftwise.core.rejection import accept as plain_accept
from draftwise.core.sampling import LogitControls, probabilities
from draftwise.core.types import Plan
from draftwise.kernels.native.acceptance import accept
from draftwise.kernels.native.library import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="no kernels on this machine")

WIDTH = 4


class Step:
    """Random drafts of random lengths, some of them from filtered proposals."""

    def __init__(self, seed, batch, vocab, lenient=False, one_hot=False, mixed=False):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape, dtype=torch.float32):
            return torch.rand(shape, generator=generator, dtype=dtype)

        self.lengths = torch.randint(0, WIDTH + 1, (batch,), generator=generator)
        rows = int((self.lengths + 1).sum())
        self.logits = torch.randn(rows, vocab, generator=generator) * 2
        q = (torch.randn(batch, WIDTH, vocab, generator=generator) * 2).softmax(dim=-1)
        self.tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(batch, WIDTH)
        if mixed:
            q = torch.nn.functional.one_hot(self.tokens, vocab).float()
        keep = random(batch, WIDTH, vocab) < 0.7
        keep.scatter_(2, self.tokens.unsqueeze(2), True)
        self.proposals = torch.zeros(batch, WIDTH + 1, vocab)
        self.proposals[:, :WIDTH] = torch.where(keep, q, 0.0)
        # Proposals after the verified part are zero, or the rest of a filtered position.
        cut = torch.arange(WIDTH + 1) >= self.lengths.unsqueeze(1)
        cut[::2] &= torch.arange(WIDTH + 1) != self.lengths[::2].unsqueeze(1)
        self.proposals.masked_fill_(cut.unsqueeze(2), 0.0)
        proposals = None if one_hot else self.proposals
        self.plan = Plan(self.tokens, tuple(self.lengths.tolist()), proposals)
        self.uniforms = random(batch, WIDTH + 1)
        self.final = random(batch, dtype=torch.float64)
        # Without distributions, all proposals are one-hot.
        self.one_hot = random(batch) < 0.5 if mixed else None
        self.following = random(batch, WIDTH + 1, dtype=torch.float64)
        self.lenience = None
        if lenient:
            self.lenience = torch.where(random(batch) < 0.5, 0.7, 1.0)
        self.controls = LogitControls(0.5 + random(batch), False, False)
        self.owner = torch.repeat_interleave(torch.arange(batch), self.lengths + 1)

    def both(self, method):
        is_nan, ours = accept(
            native_library(),
            self.logits,
            self.controls,
            self.plan,
            self.lengths,
            self.owner,
            self.uniforms,
            self.final,
            self.following,
            self.lenience,
            method == "block",
            self.one_hot,
        )
        theirs = plain_accept(
            probabilities(self.logits, self.controls.rows(self.owner)),
            self.plan.proposals,
            self.tokens,
            self.lengths,
            self.uniforms[:, :WIDTH],
            self.final,
            self.lenience,
            method,
            self.following,
            self.one_hot,
        )
        return is_nan, ours, theirs


@pytest.mark.slow
@pytest.mark.parametrize("proposals", ["whole", "one-hot", "mixed"])
@pytest.mark.parametrize("method", ["block", "token"])
def test_decisions_equal_those_of_pytorch(method, proposals):
    total = differing = 0
    for seed in range(60):
        vocab, lenient = (3, 50, 1100)[seed % 3], bool(seed % 2)
        kinds = (proposals == kind for kind in ("one-hot", "mixed"))
        step = Step(seed, 50, vocab, lenient, *kinds)
        is_nan, ours, theirs = step.both(method)
        assert not is_nan.any()
        torch.testing.assert_close(ours.acceptance, theirs.acceptance, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            ours.prefix_acceptance_prob, theirs.prefix_acceptance_prob, atol=1e-5, rtol=1e-4
        )
        same = (ours.num_accepted == theirs.num_accepted) & (ours.next_tokens == theirs.next_tokens)
        differing += int((~same).sum())
        total += len(same)
        assert (ours.num_accepted > 0).any() or proposals in ("one-hot", "mixed")
    # A uniform number may lie between two roundings of the same probability.
    assert differing <= total // 500


def test_requests_without_verified_tokens():
    step = Step(0, 20, 30)
    logits = torch.randn(20, 30)
    is_nan, accepted = accept(
        native_library(),
        logits,
        step.controls,
        Plan(torch.zeros(20, 0, dtype=torch.long), (0,) * 20, None),
        torch.zeros(20, dtype=torch.long),
        torch.arange(20),
        step.uniforms,
        step.final,
        step.following,
        None,
        True,
    )
    assert not is_nan.any()
    assert accepted.acceptance.shape == (20, 0)
    assert (accepted.num_accepted == 0).all()
    p = probabilities(logits, step.controls)
    below = p.cumsum(dim=1).gather(1, accepted.next_tokens.unsqueeze(1)).squeeze(1)
    own = p.gather(1, accepted.next_tokens.unsqueeze(1)).squeeze(1)
    assert (below - own - 1e-5 <= step.final).all()
    assert (step.final <= below + 1e-5).all()


def test_nan_logits_are_reported():
    for method in ["block", "token"]:
        step = Step(1, 30, 40)
        spoilt = torch.tensor([0, 5, len(step.logits) - 1])
        step.logits[spoilt, 7] = float("nan")
        is_nan, ours, _ = step.both(method)
        assert is_nan.nonzero().flatten().tolist() == spoilt.tolist(), method
        assert ours.acceptance.isfinite().all(), method
        assert ours.prefix_acceptance_prob.isfinite().all(), method
        assert (ours.num_accepted <= step.lengths).all(), method
        assert ((ours.next_tokens >= 0) & (ours.next_tokens < 40)).all(), method


@pytest.mark.parametrize("method", ["block", "token"])
def test_drafts_from_equal_distributions_are_accepted(method):
    """p = q′ leaves no residual. All tokens are accepted, and p gives the bonus token."""
    step = Step(2, 40, 50)
    step.lengths[:] = WIDTH
    logits = torch.randn(40, WIDTH + 1, 50)
    step.logits = logits.flatten(0, 1)
    step.controls = LogitControls(torch.ones(40), False, False)
    proposals = logits.softmax(dim=-1)
    proposals[:, WIDTH] = 0.0
    step.plan = Plan(step.tokens, (WIDTH,) * 40, proposals)
    step.uniforms = step.uniforms.clamp(max=0.999)
    step.owner = torch.repeat_interleave(torch.arange(40), WIDTH + 1)
    _, ours, _ = step.both(method)
    assert (ours.num_accepted == WIDTH).all()
