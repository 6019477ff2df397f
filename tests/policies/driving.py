"""Runs steps of a policy without models, on given distributions and drawn tokens."""

from dataclasses import dataclass, replace

import torch

from draftwise.core.signals import agreement, entropy, overlap, token_probabilities
from draftwise.core.types import CompanionScores, Draft, Outcome, Plan, StepTimes
from draftwise.policies import DraftPosition, PolicyContext, RequestState, create_policy
from draftwise.policies.base import planned_drafts
from draftwise.policies.step_times import SCORED

from ..stand_ins import draft_position, draft_signals, fixed_latency


@dataclass(frozen=True)
class World:
    """The distributions, and the tokens drafted without any early stop.

    Attributes:
        q, c, p: ``[requests, width, vocab]`` distributions of draft, companion and target.
        tokens: ``[requests, width]`` the tokens that the draft draws.
        greedy: which requests are decoded at temperature 0; their tokens are the most likely ones.
    """

    q: torch.Tensor
    c: torch.Tensor
    p: torch.Tensor
    tokens: torch.Tensor
    greedy: tuple[bool, ...]

    @classmethod
    def random(cls, num_requests, width, vocab=8, seed=0, greedy=(), similarity=2.0):
        """Random distributions that agree partly; requests in ``greedy`` are decoded greedily."""
        generator = torch.Generator().manual_seed(seed)
        shape = num_requests, width, vocab
        sharpness = 3 * torch.rand(num_requests, width, 1, generator=generator)
        shared = torch.randn(shape, generator=generator) * sharpness * similarity
        q, c, p = (
            (shared + torch.randn(shape, generator=generator)).softmax(dim=2) for _ in range(3)
        )
        flat = torch.multinomial(q.view(-1, vocab), 1, generator=generator)
        tokens = flat.view(num_requests, width)
        is_greedy = torch.tensor([row in greedy for row in range(num_requests)])
        tokens = torch.where(is_greedy.unsqueeze(1), q.argmax(dim=2), tokens)
        return cls(q, c, p, tokens, tuple(is_greedy.tolist()))

    def diverging_at(self, row, place, token, seed):
        """A copy with another token at one position and random distributions after it."""
        new = World.random(*self.q.shape, seed=seed)
        q, c, p, tokens = (each.clone() for each in (self.q, self.c, self.p, self.tokens))
        for copy, random in ((q, new.q), (c, new.c), (p, new.p)):
            copy[row, place + 1 :] = random[row, place + 1 :]
        tokens[row, place + 1 :] = new.tokens[row, place + 1 :]
        tokens[row, place] = token
        return World(q, c, p, tokens, self.greedy)

    @property
    def width(self):
        return self.tokens.shape[1]

    def states(self, history=0.5, limits=None):
        limits = limits or [self.width] * len(self.tokens)
        return [
            RequestState(50, 5, limit, row, greedy, history)
            for row, (limit, greedy) in enumerate(zip(limits, self.greedy, strict=True))
        ]


@dataclass(frozen=True)
class Step:
    """The result of a policy's step in a world.

    Attributes:
        q: ``[requests, width + 1, vocab]`` the distributions that drafted tokens were drawn from.
        draft, companion_scores, plan: as in the engine; ``companion_scores`` is ``None`` if the
            companion did not score the draft.
    """

    q: torch.Tensor
    draft: Draft
    companion_scores: CompanionScores | None
    plan: Plan


def lengths_of(policy, requests):
    """The draft lengths that a policy plans, within the limits of the requests."""
    return list(planned_drafts(policy, requests).lengths)


def take_step(policy, world, states=None, scores=None, limits=None):
    """Run one step of a policy, up to the plan.

    Args:
        policy: the policy.
        world: the distributions and the drafted tokens.
        states: states of the requests; ``None`` for the world's own.
        scores: whether the companion scores the draft; ``None`` if the policy decides.
        limits: maximum draft lengths that it has planned already; ``None`` to ask it for them.
    """
    states = states or world.states()
    wants_scores = scores
    if limits is None:
        limits, _, wants_scores = planned_drafts(policy, states)
    lengths = [0] * len(limits)
    active = [row for row, limit in enumerate(limits) if limit > 0]
    place = 0
    while active:
        for row in active:
            lengths[row] += 1
        position = draft_position(
            place, active, world.q[active, place], world.tokens[active, place]
        )
        if not policy.uses_draft_signals:
            position = DraftPosition(place, active, position.tokens, None, None, None)
        wanted = policy.keep_drafting(position)
        continues = [True] * len(active) if wanted is None else wanted.tolist()
        place += 1
        active = [
            r for r, goes_on in zip(active, continues, strict=True) if goes_on and limits[r] > place
        ]
    draft, q = written(world, lengths, place)
    if not policy.uses_draft_signals:
        draft = replace(draft, signals=None)
    companion_scores = None
    if any(lengths) and (wants_scores if scores is None else scores):
        companion_scores = scored(world, draft)
    return Step(q, draft, companion_scores, policy.select(draft, companion_scores))


def written(world, lengths, width):
    """The draft of a world with given lengths, and the distributions of its tokens."""
    inside = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    tokens = world.tokens[:, :width] * inside
    draft_probs = world.q[:, :width] * inside.unsqueeze(2)
    greedy = torch.tensor(world.greedy)
    one_hot = torch.nn.functional.one_hot(tokens, world.q.shape[2]) * inside.unsqueeze(2)
    q = torch.where(greedy[:, None, None], one_hot.float(), draft_probs)
    q = torch.nn.functional.pad(q, (0, 0, 0, 1))
    signals = draft_signals(draft_probs, tokens)
    probs = None if all(world.greedy) else q.clone()
    return Draft(tokens, tuple(lengths), probs, signals), q


def scored(world, draft):
    """The companion's scores of a draft."""
    c = world.c[:, : draft.tokens.shape[1]] * (draft.signals.draft_probs.sum(2, keepdim=True) > 0)
    c_drawn = token_probabilities(c, draft.tokens)
    return CompanionScores(
        c, overlap(draft.signals.draft_probs, c), agreement(draft.signals.token_probs, c_drawn)
    )


def outcome_of(world, step, failed=()):
    """The outcome of verifying a plan: acceptance probabilities, without sampled decisions."""
    width = step.plan.tokens.shape[1]
    verified = torch.arange(width) < torch.tensor(step.plan.lengths).unsqueeze(1)
    p = token_probabilities(world.p[:, :width], step.plan.tokens)
    q = token_probabilities(world.q[:, :width], step.plan.tokens)
    agrees = (world.p[:, :width].argmax(2) == step.plan.tokens).float()
    greedy = torch.tensor(world.greedy).unsqueeze(1)
    acceptance = torch.where(greedy, agrees, (p / q).clamp(max=1.0)) * verified
    nothing = (0,) * len(step.draft.lengths)
    return Outcome(
        step.draft.lengths,
        step.plan.lengths,
        nothing,
        nothing,
        acceptance,
        frozenset(failed),
        acceptance.cumprod(dim=1),
    )


def one_second():
    return StepTimes(0.25, 0.0, 0.0, 0.75, 0.0, 0.0)


def make(name, gamma, latency=None, has_companion=True, **options):
    context = PolicyContext(gamma, latency or fixed_latency(), None, has_companion)
    return create_policy(name, context, options)


def fix_choice(policy, length, scored=False, price=None):
    """Make an ``adaptive`` policy draft this length for all requests, whatever it learns.

    Args:
        policy: the policy.
        length: draft length, at most the ``draft_limit`` of each request.
        scored: whether the companion scores the draft.
        price: price of a verified token, in tokens; ``None`` for the policy's own.
    """

    def take(choices):
        wanted = length + SCORED * scored
        found = [choice for choice in choices if choice.kind == wanted]
        policy._choice = found[0] if found else choices[0]

    policy._take = take
    policy.lengths = [length]
    if price is not None:
        policy.__class__ = type("", (type(policy),), {"_row_price": price, "name": policy.name})
    return policy


def signals_at(world, row, place, token=None):
    """H, q(x), S and A of a token; of the drawn token by default."""
    q, c = world.q[row, place], world.c[row, place]
    x = world.tokens[row, place] if token is None else token
    return float(entropy(q)), float(q[x]), float(overlap(q, c)), float(agreement(q[x], c[x]))
