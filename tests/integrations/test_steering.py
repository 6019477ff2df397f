"""A policy in another engine's steps, with a fake engine."""

import pytest
import torch

from draftwise.core.latency import LatencyModel
from draftwise.core.signals import agreement, overlap
from draftwise.core.stage_cost import StageCost
from draftwise.core.types import CompanionScores
from draftwise.integrations.vllm.steering import Steering
from draftwise.integrations.vllm.steps import RequestView, Verified, verified_by_request
from draftwise.policies import POLICIES, PolicyContext, create_policy
from draftwise.policies.base import DraftPlan, Policy

from .ranks import Clock, Follower, Leader, Unasked

VOCAB, LONGEST = 12, 5


def costs():
    target = StageCost((1.0, 64.0), (0.01, 0.05))
    small = StageCost((1.0, 64.0), (0.001, 0.002))
    return LatencyModel(target, small, small)


def steer(name, **options):
    latency = costs()
    context = PolicyContext(LONGEST, latency, has_companion=True)
    return Steering(create_policy(name, context, options), latency, clock=Clock())


def views(count, room=LONGEST, greedy=True, first=0):
    return [RequestView(f"r{first + i}", 20 + i, 4, room, greedy) for i in range(count)]


def distributions(count, seed, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(count, VOCAB, generator=generator)).softmax(dim=-1)


def step(steering, batch, seed, scored=None):
    """Run one step of the fake engine. Returns selected lengths and drafted tokens.

    The tokens over which the companion ran are appended to ``scored``.
    """
    limit = steering.begin(batch)
    drafted, draft_probs = [], []
    for index in range(limit):
        q = distributions(len(batch), 100 * seed + index)
        tokens = q.argmax(dim=1)
        drafted.append(tokens)
        draft_probs.append(q)
        if not steering.drawn(tokens, q if steering.wants_draft_probs else None):
            break

    def run(draft):
        if scored is not None:
            scored.append(draft.tokens.tolist())
        c = distributions(len(batch) * draft.tokens.shape[1], seed).view(len(batch), -1, VOCAB)

        def scores():
            c_drawn = c.gather(2, draft.tokens.unsqueeze(2)).squeeze(2)
            signals = draft.signals
            return CompanionScores(
                c, overlap(signals.draft_probs, c), agreement(signals.token_probs, c_drawn)
            )

        return scores

    return steering.finish(run, 0.002), drafted


USABLE = [n for n, p in POLICIES.items() if not (p.uses_target_oracle or p.replaces_tokens)]
WITHOUT_PROFILE = [n for n in USABLE if not POLICIES[n].needs_profile]


@pytest.mark.parametrize("name", WITHOUT_PROFILE)
def test_every_policy_supports_changing_batches(name):
    steering = steer(name)
    generator = torch.Generator().manual_seed(1)
    batch, verified = views(3), {}
    for number in range(120):
        steering.end_step(verified, 0.02, 0)
        if number % 7 == 3:  # one request ends and another joins with a prompt to process
            batch = batch[1:] + views(1, room=0, first=1000 + number)
        elif number % 7 == 4:
            batch = [
                RequestView(m.name, m.num_tokens, m.num_output_tokens, LONGEST, m.greedy)
                for m in batch
            ]
        lengths, drafted = step(steering, batch, number)
        assert len(lengths) == len(batch)
        for view, length in zip(batch, lengths, strict=True):
            assert 0 <= length <= min(view.room, len(drafted))
        assert sum(steering.pending.lengths) == sum(lengths) <= sum(steering.pending.num_drafted)
        verified = {
            m.name: Verified(n, int(torch.randint(0, n + 1, (), generator=generator)))
            for m, n in zip(batch, lengths, strict=True)
            if m.room
        }


def test_draft_lengths_are_limited_by_each_request():
    steering = steer("fixed")
    batch = [*views(2), RequestView("x", 9, 1, 2, True), RequestView("y", 9, 0, 0, True)]
    lengths, drafted = step(steering, batch, 0)
    assert lengths == [LONGEST, LONGEST, 2, 0]
    assert len(drafted) == LONGEST


def test_svip_stops_where_the_draft_is_uncertain():
    steering = steer("svip", threshold=0.5)
    assert steering.begin(views(2)) == LONGEST
    sure = torch.eye(VOCAB)[:1]
    guess = torch.full((1, VOCAB), 1 / VOCAB)
    tokens = torch.zeros(2, dtype=torch.long)
    assert steering.drawn(tokens, torch.cat([sure, sure]))
    assert steering.drawn(tokens, torch.cat([sure, guess]))  # the second ends with this token
    assert steering.drawn(tokens, torch.cat([sure, guess]))
    assert not steering.drawn(tokens, torch.cat([guess, sure]))
    assert steering.finish(None, 0.0) == [4, 2]


def test_tokens_of_an_agreeing_companion_are_verified():
    seen = []
    steering = steer("sv")
    steering.begin(views(2))
    q = distributions(2, 3)
    while steering.drawn(q.argmax(dim=1), q):
        pass

    def same(draft):
        ones = torch.where(draft.signals.token_probs > 0, 1.0, 0.0)
        seen.append(overlap(draft.signals.draft_probs, draft.signals.draft_probs))
        return lambda: CompanionScores(draft.signals.draft_probs, ones, ones)

    steering.finish(same, 0.0)
    assert steering.pending.scored
    torch.testing.assert_close(seen[0], (seen[0] > 0).float())


class Watching(Policy):
    """A policy that records its inputs."""

    name = "watching"
    summary = source = "of this test"

    def __init__(self, context):
        super().__init__(context)
        self.outcomes, self.forgotten, self.states = [], [], []

    def plan_drafts(self, requests):
        self.states.append(requests)
        return DraftPlan([3] * len(requests))

    def observe(self, outcome, times):
        self.outcomes.append((outcome, times))

    def forget(self, request_ids):
        self.forgotten += request_ids


def test_policies_observe_the_outcome_of_a_step():
    policy = Watching(PolicyContext(LONGEST))
    steering = Steering(policy, None, clock=Clock())
    step(steering, views(3), 0)
    steering.end_step({"r0": Verified(3, 3), "r1": Verified(3, 1)}, 0.05, 0)
    outcome, times = policy.outcomes[0]
    assert outcome.num_verified == (3, 3, 0)
    assert outcome.num_accepted == (3, 1, 0)
    assert outcome.failed == {2}  # it ended, so its result is unknown
    assert outcome.acceptance.tolist()[:2] == [[1, 1, 1], [1, 0, 0]]
    assert outcome.known_lengths[:2] == (3, 2)  # unknown after the first rejected token
    assert times.total == pytest.approx(0.05)
    assert not times.is_typical
    steering.begin(views(2))
    assert policy.forgotten == [2]
    history = [state.history for state in policy.states[-1]]
    assert history[0] > history[1] > 0.5
    assert history[1] == pytest.approx(0.6 + 0.1 * 0.4 - 0.1 * 0.64)


def test_requests_that_gain_nothing_have_no_result():
    results = verified_by_request(["a", "b", "c", "d"], [3, 3, 0, 0], [4, 1, 1, 0])
    assert results == {"a": Verified(3, 3), "b": Verified(3, 0), "c": Verified(0, 0)}


def test_steps_with_prompts_are_not_typical():
    policy = Watching(PolicyContext(LONGEST))
    steering = Steering(policy, None, clock=Clock())
    for prompts in (0, 7):
        step(steering, views(2), 0)
        verified = {f"r{i}": Verified(3, 0) for i in range(2)}
        steering.end_step(verified, 0.05, prompts)
    assert [times.is_typical for _, times in policy.outcomes] == [True, False]


def test_drafts_of_other_proposers_are_ignored():
    policy = Watching(PolicyContext(LONGEST))
    steering = Steering(policy, None, clock=Clock())
    step(steering, views(2), 0)
    result = steering.end_step({"r0": Verified(5, 0), "r1": Verified(3, 1)}, 0.05, 0)
    assert policy.outcomes[0][0].failed == {0}
    assert (result.num_verified, result.num_accepted) == ((3,), (1,))


def test_a_step_without_drafts_has_no_result():
    assert steer("fixed").end_step({}, 1.0, 0) is None


@pytest.mark.parametrize("name", ["sv", "sv-published", "adaptive", "svip", "none"])
def test_other_ranks_follow_the_first_one(name):
    """They run the same passes, also of the companion, and never use a policy of their own."""
    leader = Leader()

    def run(steering):
        """Lengths, tokens that the companion reads and results of every step."""
        done, batch, verified = [], views(3), {}
        for number in range(20):
            result = steering.end_step(verified, 0.02, 0)
            if number == 10:  # one request has ended
                batch = batch[1:]
            scored = []
            selected, drafted = step(steering, batch, number, scored)
            done.append((selected, len(drafted), scored, steering.pending.num_drafted))
            verified = {m.name: Verified(n, n // 2) for m, n in zip(batch, selected, strict=True)}
            assert (result is None) == (number == 0 or not steering._agree.leads)
        return done

    latency = costs()
    context = PolicyContext(LONGEST, latency, has_companion=True)
    first = run(Steering(create_policy(name, context, {}), latency, leader, clock=Clock()))
    follower = Follower(leader.decisions)
    assert run(Steering(Unasked(PolicyContext(LONGEST)), None, follower)) == first
    assert next(follower.received, None) is None, "a decision of the first rank was not received"
    if name in ("sv", "sv-published"):
        assert any(scored for _, _, scored, _ in first)
    assert any(any(selected) for selected, _, _, _ in first) == (name != "none")


def test_steps_with_draft_signals_do_not_change_the_costs_of_passes():
    def seconds_after(has_signals):
        latency = costs()
        policy = create_policy("fixed", PolicyContext(LONGEST), {})
        watching = {"uses_draft_signals": has_signals}
        policy.__class__ = type("Watching", (type(policy),), watching)
        steering = Steering(policy, latency, clock=Clock())
        batch, verified = views(4), {}
        for number in range(60):
            steering.end_step(verified, 0.5, 0)
            lengths, _ = step(steering, batch, number)
            verified = {m.name: Verified(n, 0) for m, n in zip(batch, lengths, strict=True)}
        return latency.target_seconds(24)

    assert seconds_after(has_signals=False) > 5 * costs().target_seconds(24)
    assert seconds_after(has_signals=True) == costs().target_seconds(24)
