"""Each policy of a mixed batch sees its own part of the batch, as if it were alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.types import OneHotSignals, Outcome, Plan, StepTimes
from draftwise.errors import InvalidParameterError
from draftwise.policies import Policy, PolicyContext, RequestState, Signal, create_policy
from draftwise.policies.base import DraftPlan
from draftwise.policies.router import PolicyRouter

from ..core.speculation import uniforms_for
from ..stand_ins import draft_position, fixed_latency, profile
from .driving import (
    World,
    fix_choice,
    lengths_of,
    one_second,
    outcome_of,
    scored,
    take_step,
    written,
)

CONTEXT = PolicyContext(3, fixed_latency(), profile(), has_companion=True)
property_test = settings(deadline=None, derandomize=True, max_examples=40)


class Recorder(Policy):
    """Records its inputs. Drafts and verifies given lengths."""

    name = "recorder"
    summary = source = "tests"

    def __init__(self, stops=None, wants=False, signals=True, keeps=3):
        super().__init__(CONTEXT)
        self.stops, self.wants, self.keeps = stops, wants, keeps
        self.signals = frozenset({Signal.ENTROPY} if signals else ())
        self.states, self.positions, self.calls = [], [], []
        self.num_calls = 0

    def plan_drafts(self, requests):
        self.states.append(requests)
        self.num_calls += 1
        return DraftPlan([3] * len(requests), scored=self.wants)

    def keep_drafting(self, position):
        self.positions.append(position)
        return None if self.stops is None else position.tokens != self.stops

    def select(self, draft, companion_scores):
        self.calls.append((draft, companion_scores))
        lengths = tuple(min(self.keeps, length) for length in draft.lengths)
        return Plan(draft.tokens, lengths, draft.probs)

    def observe(self, outcome, times):
        self.calls.append((outcome, times))


def mixture_of(default, **others):
    mixture = PolicyRouter(CONTEXT, default)
    mixture._named = others
    return mixture


def states_of(world, policies, limits=None):
    return [
        replace_policy(state, name)
        for state, name in zip(world.states(limits=limits), policies, strict=True)
    ]


def replace_policy(state, name):
    return state._replace(policy=name)


class TestDrafting:
    @property_test
    @given(st.integers(0, 10**6), st.lists(st.sampled_from([None, "b", "c"]), min_size=2))
    def test_each_policy_decides_as_if_alone(self, seed, names):
        """Requests stop at different positions."""
        world = World.random(len(names), 3, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        limits = torch.randint(0, 4, (len(names),), generator=generator).tolist()

        def policies():
            return {None: Recorder(1), "b": Recorder(2), "c": Recorder()}

        made = policies()
        mixture = mixture_of(made[None], b=made["b"], c=made["c"])
        step = take_step(mixture, world, states_of(world, names, limits))
        for name, alone in policies().items():
            rows = [row for row, each in enumerate(names) if each == name]
            if not rows:
                assert not made[name].states
                continue
            part = World(
                *(each[rows] for each in (world.q, world.c, world.p, world.tokens)),
                tuple(world.greedy[row] for row in rows),
            )
            expected = take_step(alone, part, part.states(limits=[limits[row] for row in rows]))
            assert [step.draft.lengths[row] for row in rows] == list(expected.draft.lengths)
            assert len(made[name].positions) == len(alone.positions)
            for actual, reference in zip(made[name].positions, alone.positions, strict=True):
                assert actual.index == reference.index
                assert list(actual.requests) == list(reference.requests)
                for field in ("tokens", "draft_probs", "entropy", "token_probs"):
                    assert torch.equal(getattr(actual, field), getattr(reference, field))

    def test_each_policy_gets_the_targets_agreement_with_its_tokens(self):
        made = Recorder(), Recorder()
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(3, 1)
        lengths_of(mixture, states_of(world, [None, "b", None]))
        position = draft_position(0, [0, 1, 2], world.q[:, 0], world.tokens[:, 0])
        mixture.keep_drafting(replace(position, agreement=torch.tensor([0.1, 0.2, 0.3])))
        seen = [policy.positions[0].agreement.tolist() for policy in made]
        assert seen == [pytest.approx([0.1, 0.3]), pytest.approx([0.2])]

    def test_signals_are_computed_if_any_policy_of_the_step_uses_them(self):
        made = Recorder(signals=False), Recorder(signals=True)
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(2, 2)
        for names, uses in (([None, None], False), ([None, "b"], True), (["b", "b"], True)):
            lengths_of(mixture, states_of(world, names))
            assert mixture.uses_draft_signals == uses

    def test_policies_that_use_no_signals_get_none(self):
        made = Recorder(signals=False), Recorder(signals=True)
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(3, 2)
        take_step(mixture, world, states_of(world, [None, "b", None]))
        assert made[0].calls[0][0].signals is None
        assert made[1].calls[0][0].signals is not None


class TestCompanionScores:
    @pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
    def test_policies_that_want_scores_get_their_own_part(self, wanted):
        made = [Recorder(wants=wants) for wants in wanted]
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(4, 2, seed=1)
        step = take_step(mixture, world, states_of(world, ["b", None, "b", None]))
        assert step.companion_scores is not None
        for policy, wants, rows in zip(made, wanted, ([1, 3], [0, 2]), strict=True):
            ((_, companion_scores),) = policy.calls
            assert (companion_scores is not None) == wants
            if wants:
                for field in ("probs", "overlap", "agreement"):
                    part = getattr(companion_scores, field)
                    assert torch.equal(part, getattr(step.companion_scores, field)[rows])

    def test_no_policy_wants_scores(self):
        made = Recorder(), Recorder()
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(2, 2)
        assert take_step(mixture, world, states_of(world, [None, "b"])).companion_scores is None
        # Every policy was called, because some policies count their steps.
        assert [policy.num_calls for policy in made] == [1, 1]


class TestPlans:
    @property_test
    @given(st.integers(0, 10**6), st.booleans())
    def test_staged_replaces_tokens_of_its_own_requests_only(self, seed, has_greedy):
        """The other requests keep their drafted tokens."""
        greedy = (0, 3) if has_greedy else ()
        world = World.random(6, 3, seed=seed, greedy=greedy)
        names = ["staged", None, "b", "staged", None, "staged"]
        rows = [0, 3, 5]
        draft, _ = written(world, [3, 2, 3, 1, 0, 3], 3)
        uniforms = uniforms_for(6, 3).stage
        draft = replace(draft, stage_uniforms=uniforms)
        companion_scores = scored(world, draft)

        mixture = mixture_of(
            Recorder(keeps=1), b=Recorder(keeps=2), staged=create_policy("staged", CONTEXT, {})
        )
        lengths_of(mixture, states_of(world, names))
        assert mixture.wants_companion
        plan = mixture.select(draft, companion_scores)

        part = World(
            *(each[rows] for each in (world.q, world.c, world.p, world.tokens)),
            tuple(world.greedy[row] for row in rows),
        )
        own, _ = written(part, [3, 1, 3], 3)
        own = replace(
            own,
            stage_uniforms=type(uniforms)(uniforms.accept[rows], uniforms.final[rows]),
        )
        staged = create_policy("staged", CONTEXT, {})
        lengths_of(staged, part.states())
        expected = staged.select(own, scored(part, own))
        assert torch.equal(plan.tokens[rows], expected.tokens)
        assert torch.equal(plan.proposals[rows], expected.proposals)
        assert [plan.lengths[row] for row in rows] == list(expected.lengths)
        assert [plan.num_own[row] for row in rows] == list(expected.num_own)
        others = [1, 2, 4]
        assert torch.equal(plan.tokens[others], draft.tokens[others])
        assert torch.equal(plan.proposals[others], draft.probs[others])
        assert [plan.lengths[row] for row in others] == [1, 2, 0]
        assert [plan.num_own[row] for row in others] == [1, 2, 0]

    def test_greedy_batches_have_no_proposals(self):
        world = World.random(2, 2, greedy=(0, 1))
        mixture = mixture_of(Recorder(), b=Recorder())
        step = take_step(mixture, world, states_of(world, [None, "b"]))
        assert step.plan.proposals is None
        assert step.plan.lengths == (2, 2)

    def test_parts_do_not_share_memory_with_the_batch(self):
        """A policy may filter its part in place."""
        filters, recorder = Recorder(), Recorder()
        select = filters.select

        def overwrite(draft, companion_scores):
            plan = select(draft, companion_scores)
            draft.probs.zero_()
            return plan

        filters.select = overwrite
        mixture = mixture_of(filters, b=recorder)
        world = World.random(2, 2)
        step = take_step(mixture, world, states_of(world, [None, "b"]))
        assert not step.plan.proposals[0].any()
        assert torch.equal(step.plan.proposals[1], step.q[1])
        assert torch.equal(step.draft.probs, step.q)


def test_the_part_of_a_one_hot_draft_builds_no_distributions():
    tokens = torch.tensor([[3, 4], [5, 0], [0, 0]])
    acceptance = torch.tensor([[0.9, 0.8], [0.7, 0.0], [0.0, 0.0]])
    signals = OneHotSignals(tokens, (2, 1, 0), 8, acceptance)
    rows = torch.tensor([2, 0])
    part = signals.of_requests(rows)
    assert not {"_draft_probs"} & (vars(part).keys() | vars(signals).keys())
    for name in ("entropy", "token_probs", "draft_probs"):
        assert torch.equal(getattr(part, name), getattr(signals, name)[rows])


class TestLearning:
    def outcome(self):
        return Outcome(
            (3, 2, 1, 0),
            (2, 2, 1, 0),
            (1, 2, 0, 0),
            (10, 11, 12, 13),
            torch.arange(8.0).view(4, 2) / 8,
            frozenset({1, 2}),
            torch.arange(8.0).view(4, 2) / 16,
            (2, 1, 1, 0),
        )

    def test_each_policy_observes_the_outcome_of_its_own_requests(self):
        made = Recorder(), Recorder()
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(4, 2)
        lengths_of(mixture, states_of(world, [None, "b", None, "b"]))
        outcome = self.outcome()
        mixture.observe(outcome, one_second())
        for policy, rows, failed in ((made[0], [0, 2], {1}), (made[1], [1, 3], {0})):
            ((part, times),) = policy.calls
            for field in (
                "num_drafted",
                "num_verified",
                "num_accepted",
                "next_tokens",
                "num_known",
            ):
                whole = getattr(outcome, field)
                assert getattr(part, field) == tuple(whole[row] for row in rows)
            assert torch.equal(part.acceptance, outcome.acceptance[rows])
            assert torch.equal(part.prefix_acceptance_prob, outcome.prefix_acceptance_prob[rows])
            assert part.failed == failed
            assert not times.is_typical

    def test_a_step_with_one_policy_is_passed_on_unchanged(self):
        made = Recorder(), Recorder()
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(4, 2)
        lengths_of(mixture, states_of(world, ["b"] * 4))
        outcome, times = self.outcome(), one_second()
        mixture.observe(outcome, times)
        assert made[1].calls == [(outcome, times)]
        assert not made[0].calls

    def test_a_step_without_generated_tokens_is_ignored(self):
        made = Recorder(), Recorder()
        mixture = mixture_of(made[0], b=made[1])
        lengths_of(mixture, states_of(World.random(2, 1), [None, "b"]))
        mixture.observe(Outcome((), (), (), (), None), StepTimes(0, 0, 0, 0, 0, 0, 5))
        assert made[0].calls == made[1].calls == []

    def test_priced_policies_in_one_batch_learn_acceptance_but_no_costs(self):
        mixture = PolicyRouter(CONTEXT, create_policy("adaptive", CONTEXT, {}))
        both = mixture.default, mixture.get("sv")
        for policy in both:
            fix_choice(policy, 3)
        before = [policy.survival() for policy in both]
        for seed in range(5):
            world = World.random(4, 3, seed=seed)
            step = take_step(mixture, world, states_of(world, [None, "sv", "sv", "adaptive"]))
            mixture.observe(outcome_of(world, step), one_second())
        for policy, old in zip(both, before, strict=True):
            assert (policy.survival() != old).all()
            assert policy._of_a_part.bucket.times.num_steps == 0


class TestGuard:
    def test_nothing_is_drafted_or_looked_for_in_steps_that_rest(self):
        context = replace(CONTEXT, guarded=True)
        policy = Recorder()
        router = PolicyRouter(context, policy)
        assert [lengths_of(router, [RequestState(50, 5, 3)]) for _ in range(2)] == [[0], [0]]
        assert not router.looks_for_offers([RequestState(50, 5, 3)])

    def test_a_reset_begins_a_new_account(self):
        router = PolicyRouter(replace(CONTEXT, guarded=True), Recorder())
        router.guard.balance = 9.0
        router.reset("adaptive", 2, {})
        assert router.guard.balance == 1.0
        assert router.default.guard is router.guard


class TestNames:
    def test_the_name_of_the_default_policy_gives_the_default(self):
        default = create_policy("tetris", CONTEXT, {"extra": 1})
        mixture = PolicyRouter(CONTEXT, default)
        assert mixture.get("tetris") is mixture.get(None) is default
        world = World.random(2, 2)
        lengths_of(mixture, states_of(world, [None, "tetris"]))
        assert mixture._parts == [(default, [0, 1])]

    def test_other_policies_are_created_once(self):
        mixture = PolicyRouter(CONTEXT, Recorder())
        assert mixture.get("fixed") is mixture.get("fixed")

    def test_reset_replaces_all_policies(self):
        mixture = PolicyRouter(CONTEXT, Recorder())
        before = mixture.get("fixed")
        mixture.reset("svip", 2, {})
        assert mixture.default.name == "svip"
        assert mixture.get("fixed") is not before
        assert mixture.get("fixed").num_speculative_tokens == 2

    def test_an_invalid_reset_changes_nothing(self):
        default = Recorder()
        mixture = PolicyRouter(CONTEXT, default)
        with pytest.raises(InvalidParameterError):
            mixture.reset("svip", 2, {"threshold": -1})
        assert mixture.default is default
        assert mixture.num_speculative_tokens == 3

    def test_all_policies_forget_ended_requests(self):
        made = Recorder(), Recorder()
        forgotten = []
        for policy in made:
            policy.forget = forgotten.append
        mixture_of(made[0], b=made[1]).forget([4, 5])
        assert forgotten == [[4, 5], [4, 5]]
