"""Each policy of a mixed batch sees its own part of it, as if it were alone."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.core.types import Outcome, Plan, StepTimes
from draftwise.errors import InvalidParameterError
from draftwise.policies import Policy, PolicyContext, Signal, create_policy
from draftwise.policies.router import PolicyRouter

from ..core.speculation import uniforms_for
from ..stand_ins import draft_position, fixed_latency, profile
from .driving import World, one_second, outcome_of, scored, take_step, written

CONTEXT = PolicyContext(3, fixed_latency(), profile(), has_companion=True)
property_test = settings(deadline=None, derandomize=True, max_examples=40)


class Notes(Policy):
    """Records its inputs. Drafts and verifies given lengths."""

    name = "notes"
    summary = source = "tests"

    def __init__(self, stops=None, wants=False, signals=True, keeps=3):
        super().__init__(CONTEXT)
        self.stops, self.wants, self.keeps = stops, wants, keeps
        self.signals = frozenset({Signal.ENTROPY} if signals else ())
        self.states, self.positions, self.seen = [], [], []
        self.asked = 0

    def draft_lengths(self, requests):
        self.states.append(requests)
        return [min(3, request.draft_limit) for request in requests]

    def keep_drafting(self, position):
        self.positions.append(position)
        return None if self.stops is None else position.tokens != self.stops

    def wants_companion(self):
        self.asked += 1
        return self.wants

    def select(self, draft, companion_scores):
        self.seen.append((draft, companion_scores))
        lengths = tuple(min(self.keeps, length) for length in draft.lengths)
        return Plan(draft.tokens, lengths, draft.probs)

    def observe(self, outcome, times):
        self.seen.append((outcome, times))


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
    def test_each_decides_as_it_would_alone(self, seed, names):
        """With requests that stop at different places."""
        world = World.random(len(names), 3, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        limits = torch.randint(0, 4, (len(names),), generator=generator).tolist()

        def policies():
            return {None: Notes(1), "b": Notes(2), "c": Notes()}

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
            for ours, its in zip(made[name].positions, alone.positions, strict=True):
                assert (ours.index, list(ours.requests)) == (its.index, list(its.requests))
                for field in ("tokens", "draft_probs", "entropy", "token_probs"):
                    assert torch.equal(getattr(ours, field), getattr(its, field))

    def test_what_the_target_thinks_is_handed_on(self):
        made = Notes(), Notes()
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(3, 1)
        mixture.draft_lengths(states_of(world, [None, "b", None]))
        position = draft_position(0, [0, 1, 2], world.q[:, 0], world.tokens[:, 0])
        mixture.keep_drafting(replace(position, agreement=torch.tensor([0.1, 0.2, 0.3])))
        told = [policy.positions[0].agreement.tolist() for policy in made]
        assert told == [pytest.approx([0.1, 0.3]), pytest.approx([0.2])]

    def test_signals_are_computed_if_anybody_in_the_step_looks(self):
        made = Notes(signals=False), Notes(signals=True)
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(2, 2)
        for names, looks in (([None, None], False), ([None, "b"], True), (["b", "b"], True)):
            mixture.draft_lengths(states_of(world, names))
            assert mixture.uses_draft_signals() == looks

    def test_who_does_not_look_sees_nothing(self):
        made = Notes(signals=False), Notes(signals=True)
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(3, 2)
        take_step(mixture, world, states_of(world, [None, "b", None]))
        assert made[0].seen[0][0].signals is None
        assert made[1].seen[0][0].signals is not None


class TestCompanionScores:
    @pytest.mark.parametrize("wishes", [(True, False), (False, True), (True, True)])
    def test_who_asked_hears_of_its_own(self, wishes):
        made = [Notes(wants=wants) for wants in wishes]
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(4, 2, seed=1)
        step = take_step(mixture, world, states_of(world, ["b", None, "b", None]))
        assert step.companion_scores is not None
        for policy, wants, rows in zip(made, wishes, ([1, 3], [0, 2]), strict=True):
            ((_, companion_scores),) = policy.seen
            assert (companion_scores is not None) == wants
            if wants:
                for field in ("probs", "overlap", "agreement"):
                    ours = getattr(companion_scores, field)
                    assert torch.equal(ours, getattr(step.companion_scores, field)[rows])

    def test_nobody_asked(self):
        made = Notes(), Notes()
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(2, 2)
        assert take_step(mixture, world, states_of(world, [None, "b"])).companion_scores is None
        # Every policy was asked, because some policies count their steps.
        assert [policy.asked for policy in made] == [1, 1]


class TestPlans:
    @property_test
    @given(st.integers(0, 10**6), st.booleans())
    def test_staged_beside_others(self, seed, has_greedy):
        """It puts other tokens in the place of the drafted ones, in its own rows only."""
        greedy = (0, 3) if has_greedy else ()
        world = World.random(6, 3, seed=seed, greedy=greedy)
        names = ["staged", None, "b", "staged", None, "staged"]
        rows = [0, 3, 5]
        draft, _ = written(world, [3, 2, 3, 1, 0, 3], 3)
        uniforms = uniforms_for(6, 3).stage
        draft = replace(draft, stage_uniforms=uniforms)
        companion_scores = scored(world, draft)

        mixture = mixture_of(
            Notes(keeps=1), b=Notes(keeps=2), staged=create_policy("staged", CONTEXT, {})
        )
        mixture.draft_lengths(states_of(world, names))
        assert mixture.wants_companion()
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
        staged.draft_lengths(part.states())
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
        mixture = mixture_of(Notes(), b=Notes())
        step = take_step(mixture, world, states_of(world, [None, "b"]))
        assert step.plan.proposals is None
        assert step.plan.lengths == (2, 2)

    def test_parts_do_not_share_memory_with_the_whole(self):
        """A policy may filter in place."""
        filters, notes = Notes(), Notes()
        select = filters.select

        def spoil(draft, companion_scores):
            plan = select(draft, companion_scores)
            draft.probs.zero_()
            return plan

        filters.select = spoil
        mixture = mixture_of(filters, b=notes)
        world = World.random(2, 2)
        step = take_step(mixture, world, states_of(world, [None, "b"]))
        assert not step.plan.proposals[0].any()
        assert torch.equal(step.plan.proposals[1], step.q[1])
        assert torch.equal(step.draft.probs, step.q)


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

    def test_each_sees_what_became_of_its_own(self):
        made = Notes(), Notes()
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(4, 2)
        mixture.draft_lengths(states_of(world, [None, "b", None, "b"]))
        outcome = self.outcome()
        mixture.observe(outcome, one_second())
        for policy, rows, failed in ((made[0], [0, 2], {1}), (made[1], [1, 3], {0})):
            ((part, times),) = policy.seen
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

    def test_a_step_of_one_policy_is_its_own(self):
        made = Notes(), Notes()
        mixture = mixture_of(made[0], b=made[1])
        world = World.random(4, 2)
        mixture.draft_lengths(states_of(world, ["b"] * 4))
        outcome, times = self.outcome(), one_second()
        mixture.observe(outcome, times)
        assert made[1].seen == [(outcome, times)]
        assert not made[0].seen

    def test_a_step_without_gains(self):
        made = Notes(), Notes()
        mixture = mixture_of(made[0], b=made[1])
        mixture.draft_lengths(states_of(World.random(2, 1), [None, "b"]))
        mixture.observe(Outcome((), (), (), (), None), StepTimes(0, 0, 0, 0, 0, 0, 5))
        assert made[0].seen == made[1].seen == []

    def test_priced_policies_side_by_side_learn_estimates_and_no_costs(self):
        mixture = PolicyRouter(CONTEXT, create_policy("adaptive", CONTEXT, {}))
        other = mixture.get("sv")
        before = [policy.models[False].weights.copy() for policy in (mixture.default, other)]
        for seed in range(5):
            world = World.random(4, 3, seed=seed)
            step = take_step(mixture, world, states_of(world, [None, "sv", "sv", "adaptive"]))
            mixture.observe(outcome_of(world, step), one_second())
        for policy, weights in zip((mixture.default, other), before, strict=True):
            assert not torch.equal(
                torch.tensor(policy.models[False].weights), torch.tensor(weights)
            )
            for choice in policy.prices._choices.values():
                assert choice.corrections.num_steps(choice.incumbent.point) == 0


class TestNames:
    def test_the_defaults_name_is_the_default(self):
        default = create_policy("tetris", CONTEXT, {"extra": 1})
        mixture = PolicyRouter(CONTEXT, default)
        assert mixture.get("tetris") is mixture.get(None) is default
        world = World.random(2, 2)
        mixture.draft_lengths(states_of(world, [None, "tetris"]))
        assert mixture._parts == [(default, [0, 1])]

    def test_others_are_made_once(self):
        mixture = PolicyRouter(CONTEXT, Notes())
        assert mixture.get("fixed") is mixture.get("fixed")

    def test_after_a_change_all_are_new(self):
        mixture = PolicyRouter(CONTEXT, Notes())
        before = mixture.get("fixed")
        mixture.reset("svip", 2, {})
        assert mixture.default.name == "svip"
        assert mixture.get("fixed") is not before
        assert mixture.get("fixed").num_speculative_tokens == 2

    def test_a_change_that_cannot_be_changes_nothing(self):
        default = Notes()
        mixture = PolicyRouter(CONTEXT, default)
        with pytest.raises(InvalidParameterError):
            mixture.reset("svip", 2, {"threshold": -1})
        assert mixture.default is default
        assert mixture.num_speculative_tokens == 3

    def test_those_that_ended_are_forgotten_by_all(self):
        made = Notes(), Notes()
        forgotten = []
        for policy in made:
            policy.forget = forgotten.append
        mixture_of(made[0], b=made[1]).forget([4, 5])
        assert forgotten == [[4, 5], [4, 5]]
