"""Token trees that a companion scores: the scores, losslessness, and what is selected by them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftwise import LLM, RequestSpeculation, SamplingParams, SpeculationConfig
from draftwise.core.types import CompanionScores, Draft, Outcome, TreeProbs, TreeSignals
from draftwise.errors import InvalidParameterError
from draftwise.policies import scored_trees
from draftwise.policies.offers import OfferPricing
from draftwise.policies.scored_trees import ScoredTrees
from draftwise.policies.shapes import ShapeChoice
from draftwise.policies.sv import SpeculativeVerification, _CompanionValue

from ..tiny_models import Recipe
from .assembly import assemble, assemble_recipe, generate, token_ids
from .heads import engine_with_head
from .test_model_trees import (
    HEAD,
    RECIPE,
    REPEATING,
    VARIED,
    alone,
    assert_greedy_texts,
    greedy_and_sampled_work,
)
from .test_proposers import NOT_UNLIKELY
from .test_text_proposers import CONTROLS, p_value

KINDS = ["model", "head", "copies and model"]
COMPANION_NOISE = {"noise": 0.2, "noise_seed": 2}
SPECULATION = RequestSpeculation()


def scoring(models, kind="model", policy="sv", max_batch_size=8, recipe=RECIPE, **settings):
    """An engine that drafts trees and has a companion: the target with noise."""
    settings = {"policy": policy, "tree_width": 3, "num_speculative_tokens": 8} | settings
    if kind == "model":
        return assemble_recipe(models, recipe, max_batch_size, **settings)
    if kind == "head":
        vocab = recipe.vocab
        head = HEAD.changed(vocab=vocab, draft_vocab=vocab * 3 // 4)
        return engine_with_head(models, recipe, head, max_batch_size=max_batch_size, **settings)
    draft = ["suffix", models.folder(recipe.draft(0.1))]
    companion = models.folder(recipe.draft(**COMPANION_NOISE))
    return assemble(models.folder(recipe), draft, companion, max_batch_size, **settings)


@pytest.fixture
def every_step(monkeypatch):
    """Every step has trees, whatever they cost, and the companion scores all of them."""
    monkeypatch.setattr(_CompanionValue, "scores_step", lambda self: True)
    monkeypatch.setattr(ShapeChoice, "branches", lambda self, count: True)
    monkeypatch.setattr(
        OfferPricing, "grow_trees", lambda self, level, *_: np.ones(len(level.values), dtype=bool)
    )
    monkeypatch.setattr(OfferPricing, "least_node_value", lambda *_: 0.0)
    monkeypatch.setattr(SpeculativeVerification, "_node_price", lambda *_: 0.3)


def recorded_plans(engine):
    """A list to which each scored draft is added, with its plan."""
    found, right = [], engine._pipeline.select

    def select(draft, scores):
        plan = right(draft, scores)
        if scores is not None:
            found.append((draft, plan))
        return plan

    engine._pipeline.select = select
    return found


def run(engine):
    """Take steps until all requests have ended."""
    while engine.num_unfinished:
        engine.step()


def num_dropped(plans):
    """Number of drafted nodes that were not verified."""
    return sum(sum(draft.lengths) - sum(plan.lengths) for draft, plan in plans)


def recorded_scores(engine):
    """A list to which each scored draft is added, with its batch, texts and scores."""
    found, right = [], engine._pipeline.score

    def score(batch, draft):
        scores = right(batch, draft)
        if scores is not None:
            texts = [list(request.tokens) for request in batch.generating]
            found.append((batch, texts, draft, scores))
        return scores

    engine._pipeline.score = score
    return found


def path_to(tokens, parents, node):
    """The drafted tokens from the root to a node, itself included."""
    path = []
    while node != -1:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


@pytest.mark.slow
@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_whole_texts(models, kind):
    """S and A of every node equal those of the companion's passes over the text and the path."""
    engine = scoring(models, kind, recipe=VARIED, num_speculative_tokens=10)
    found = recorded_scores(engine)
    prompts = [[*range(16), *range(i, 16)] for i in range(12)]
    params = [SamplingParams(max_tokens=24, temperature=i % 2, seed=i) for i in range(12)]
    generate(engine, prompts, params)
    reference = models.reference(VARIED.draft(**COMPANION_NOISE))
    compared = depths = 0
    for batch, texts, draft, scores in found[:60]:
        signals = draft.tree_signals
        for index, (text, length) in enumerate(zip(texts, draft.lengths, strict=True)):
            tokens, parents = draft.host_tokens[index][:length], draft.parents[index].tolist()
            rows = signals.probs.rows[index]
            assert (
                len(rows) == len(signals.ranks[index]) == len(signals.acceptance[index]) >= length
            )
            greedy = batch.generating[index].params.temperature == 0
            for node in range(length):
                row = rows[node]
                if row < 0:
                    assert scores.overlap[index, node].isnan()
                    continue
                above = path_to(tokens, parents, parents[node])
                with torch.no_grad():
                    logits = reference(torch.tensor([[*text, *above]])).logits[0, -1]
                c = logits.float().softmax(0)
                q = signals.probs.over_vocabulary(slice(row, row + 1))[0]
                expected = torch.minimum(q, c).sum()
                assert float(scores.overlap[index, node]) == pytest.approx(
                    float(expected), abs=1e-3
                )
                ratio = float((c[tokens[node]] / q[tokens[node]]).clamp(max=1.0))
                assert float(scores.agreement[index, node]) == pytest.approx(ratio, abs=5e-3)
                compared += 1
                depths = max(depths, len(above))
            drawn = draft.tree_probs is not None and bool(draft.tree_probs.rows[index])
            assert not (greedy and drawn)
    assert compared > 100
    assert depths >= 2


def test_a_companion_reads_what_it_missed_before_it_scores_again(models, monkeypatch):
    """Also more tokens than a tree may have."""
    steps = iter(range(10_000))
    monkeypatch.setattr(_CompanionValue, "scores_step", lambda self: next(steps) % 90 > 86)
    monkeypatch.setattr(ShapeChoice, "branches", lambda self, count: True)
    recipe = Recipe(vocab=16, seed=6, context=512, config={"num_hidden_layers": 2})
    engine = scoring(models, recipe=recipe, max_batch_size=1)
    found = recorded_scores(engine)
    generate(engine, [[1, 2, 3]], [SamplingParams(max_tokens=400, temperature=0)])
    reference = models.reference(recipe.draft(**COMPANION_NOISE))
    assert len(found) > 2
    assert len(found[1][1][0]) > 80
    for _, (text,), draft, scores in found:
        row = draft.tree_signals.probs.rows[0][0]
        with torch.no_grad():
            c = reference(torch.tensor([text])).logits[0, -1].float().softmax(0)
        expected = torch.minimum(
            draft.tree_signals.probs.over_vocabulary(slice(row, row + 1))[0], c
        )
        assert float(scores.overlap[0, 0]) == pytest.approx(float(expected.sum()), abs=1e-3)


@pytest.mark.usefixtures("every_step")
@pytest.mark.covering("kind", "policy", "max_batch_size")
@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 16])
@pytest.mark.parametrize("policy", ["sv", "sv-predictable"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_follow_the_target(models, kind, policy, max_batch_size):
    engine = scoring(models, kind, policy, max_batch_size)
    plans = recorded_plans(engine)
    prompt = REPEATING if kind.startswith("copies") else [1, 2, 3]
    count = 1500 if max_batch_size == 1 else 3000
    p = p_value(models, engine, {}, count, prompt, RECIPE, 0.05, 7)
    assert p > NOT_UNLIKELY
    assert num_dropped(plans) > count


@pytest.mark.usefixtures("every_step")
@pytest.mark.covering("kind", "controls", "max_batch_size")
@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 16])
@pytest.mark.parametrize("controls", CONTROLS)
@pytest.mark.parametrize("kind", ["model", "head"])
def test_texts_follow_the_target_with_every_control(models, kind, controls, max_batch_size):
    engine = scoring(models, kind, "sv", max_batch_size)
    count = 1200 if max_batch_size == 1 else 2000
    settings = count, [1, 2, 3], RECIPE, 0.02, 7
    assert p_value(models, engine, CONTROLS[controls], *settings) > NOT_UNLIKELY


@pytest.mark.usefixtures("every_step")
@pytest.mark.slow
def test_selecting_a_drawn_node_by_its_own_agreement_is_noticed(models, monkeypatch):
    """The node itself is then verified by a comparison that only its descendants may use."""

    def biased(self, tree, least):
        verified = {-1}
        for node, parent in enumerate(tree.parents):
            if parent in verified and tree.agreement[node] >= 0.8:
                verified.add(node)
        return sorted(verified - {-1}), np.zeros(len(tree.tokens))

    monkeypatch.setattr(ScoredTrees, "_chosen", biased)
    engine = scoring(models, max_batch_size=64)
    assert p_value(models, engine, {}, 6000, [1, 2, 3], RECIPE, 0.05, 7) < 1e-6


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("policy", ["sv", "sv-predictable"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_those_without_drafts(models, kind, policy):
    """At any batch size and number of nodes, also beside requests whose trees are drawn."""
    prompts, params = greedy_and_sampled_work()
    expected = generate(alone(models, VARIED), prompts, params)
    for max_batch_size, nodes in ((1, 3), (4, 12), (16, 40)):
        engine = scoring(models, kind, policy, max_batch_size, VARIED, num_speculative_tokens=nodes)
        found = recorded_scores(engine)
        outputs = generate(engine, prompts, params)
        assert_greedy_texts(params, outputs, expected)
        assert found
        assert sum(output.speculation.num_accepted for output in outputs) > 0


@pytest.mark.usefixtures("every_step")
def test_requests_of_another_policy_keep_their_trees(models):
    """In a batch of several policies, the scores select the nodes of ``sv`` alone."""
    engine = scoring(models, recipe=VARIED)
    prompts = [[1 + i % 5, 2, 3 + i % 7] for i in range(8)]
    params = [SamplingParams(max_tokens=20, temperature=0)] * 8
    plans = recorded_plans(engine)
    requests = [
        engine.add(None, prompt, each, replace(SPECULATION, policy=policy))
        for prompt, each, policy in zip(prompts, params, [None, "fixed"] * 4, strict=True)
    ]
    while engine.num_unfinished:
        engine.step()
    outputs = [request.output() for request in requests]
    assert token_ids(outputs) == token_ids(generate(alone(models, VARIED), prompts, params))
    together = [(draft, plan) for draft, plan in plans if len(plan.lengths) == 8]
    assert together
    assert all(plan.lengths[1::2] == draft.lengths[1::2] for draft, plan in together)
    assert any(plan.lengths[::2] < draft.lengths[::2] for draft, plan in together)


def test_a_companion_that_cannot_read_trees_is_refused(models):
    folder = models.folder(RECIPE)
    settings = SpeculationConfig(
        models.folder(RECIPE.draft(0.1)), policy="sv", tree_width=2, companion="target:exit=1"
    )
    with pytest.raises(InvalidParameterError, match="a companion that is an exit") as error:
        LLM(folder, settings, dtype="float32")
    assert error.value.field == "tree_width"


class TestScoredTrees:
    """A root with two children, and two children of the first one."""

    PARENTS = (-1, -1, 0, 0)

    @pytest.fixture(autouse=True)
    def _explores_rarely(self, monkeypatch):
        monkeypatch.setattr(scored_trees, "_EXPLORE_EVERY", 1000)

    def draft(self, drawn=False, acceptance=(0.6, 0.3, 0.5, 0.4)):
        tokens = torch.tensor([[5, 6, 7, 8]])
        probs = TreeProbs(torch.full((2, 9), 1 / 9), [[0, 0, 1, 1]], None, 9)
        return Draft(
            tokens,
            (4,),
            None,
            parents=torch.tensor([self.PARENTS]),
            tree_probs=probs if drawn else None,
            tree_signals=TreeSignals(probs, [acceptance], [[0, 1, 0, 1]], [4]),
        )

    def scores(self, overlap=(0.6, 0.6, 0.75, 0.75), agreement=(0.95, 0.2, 0.6, 0.05)):
        rows = torch.tensor([overlap]), torch.tensor([agreement])
        return CompanionScores(torch.zeros(1, 4, 0), *rows)

    def outcome(self, paths, next_token, nodes=None):
        return Outcome((4,), (4,), (len(paths),), (next_token,), paths=(paths,), nodes=nodes)

    def test_without_experience_the_estimates_of_the_draft_decide(self):
        trees = ScoredTrees()
        assert trees.select(self.draft(), self.scores(), [4], 0.25) == ((0, 1, 2),)
        assert trees.num_dropped == 1
        assert trees.gained == pytest.approx(-0.24)

    def test_it_learns_which_scores_tell_that_a_node_is_right(self):
        trees = ScoredTrees()
        for _ in range(200):
            trees.select(self.draft(), self.scores(), [4], 0.0)
            # The second child of each node is right, although its A is small.
            trees.learn(self.outcome((1,), 3))
        assert trees.select(self.draft(), self.scores(), [1], 0.3) == ((1,),)
        # Without scores the first node would be verified.
        assert trees.gained > 0.5
        assert trees.num_dropped == 0

    def test_a_node_that_was_not_verified_may_be_the_targets_token(self):
        """Where nodes are proposed with certainty, it is known whether it was right."""
        trees, others = ScoredTrees(), ScoredTrees()
        for each, token in ((trees, 6), (others, 3)):
            for _ in range(100):
                each.select(self.draft(), self.scores(), [4], 0.5)
                each.learn(self.outcome((), token))
        chosen = [each.select(self.draft(), self.scores(), [4], 0.28) for each in (trees, others)]
        assert chosen[0] == ((1,),)
        assert chosen[1] == ((),)

    def test_a_drawn_node_is_not_selected_by_its_own_agreement(self):
        trees = ScoredTrees()
        for _ in range(100):
            trees.select(self.draft(True), self.scores(), [4], 0.0)
            trees.learn(self.outcome((0, 2), 3))
        low = self.scores(agreement=(0.95, 0.0, 0.0, 0.0))
        high = self.scores(agreement=(0.95, 1.0, 1.0, 1.0))
        for least in np.linspace(0.05, 0.95, 19):
            assert trees.select(self.draft(True), low, [4], least) == trees.select(
                self.draft(True), high, [4], least
            )
        # The agreement of the nodes before does count.
        unlikely = self.scores(agreement=(0.0, 0.2, 0.6, 0.05))
        for _ in range(300):
            trees.select(self.draft(True), unlikely, [4], 0.0)
            trees.learn(self.outcome((), 3))
        chosen = [trees.select(self.draft(True), each, [4], 0.2) for each in (low, unlikely)]
        assert len(chosen[0][0]) > len(chosen[1][0])

    def test_no_drawn_node_is_verified_without_its_siblings_before(self):
        draft = self.draft(True, acceptance=(0.1, 0.6, 0.5, 0.4))
        assert ScoredTrees().select(draft, self.scores(), [4], 0.3) == ((),)
        draft = self.draft(False, acceptance=(0.1, 0.6, 0.5, 0.4))
        assert ScoredTrees().select(draft, self.scores(), [4], 0.3) == ((1,),)

    def test_nodes_without_scores_keep_the_estimates_of_the_draft(self):
        trees = ScoredTrees()
        nothing = self.scores((np.nan,) * 4, (np.nan,) * 4)
        for _ in range(50):
            trees.select(self.draft(), nothing, [4], 0.0)
            trees.learn(self.outcome((), 3))
        assert trees.select(self.draft(), nothing, [4], 0.25) == ((0, 1, 2),)

    def test_copied_nodes_keep_their_estimates(self):
        """Those of a request that the model did not draft for, too."""
        draft = self.draft(acceptance=(0.9, 0.3, 0.8, 0.4))
        draft = replace(
            draft,
            tree_signals=replace(
                draft.tree_signals,
                probs=replace(draft.tree_signals.probs, rows=[[-1] * 4]),
                ranks=[[-1] * 4],
            ),
        )
        nothing = self.scores((np.nan,) * 4, (np.nan,) * 4)
        assert ScoredTrees().select(draft, nothing, [4], 0.5) == ((0, 2),)

    def test_now_and_then_all_drawn_nodes_are_verified(self, monkeypatch):
        monkeypatch.setattr(scored_trees, "_EXPLORE_EVERY", 4)
        trees = ScoredTrees()
        chosen = [trees.select(self.draft(True), self.scores(), [4], 0.25)[0] for _ in range(8)]
        assert [len(each) for each in chosen] == [3, 3, 3, 4] * 2
        # Where nodes are proposed with certainty, it is known anyway whether they were right.
        trees = ScoredTrees()
        chosen = [trees.select(self.draft(), self.scores(), [4], 0.25)[0] for _ in range(8)]
        assert [len(each) for each in chosen] == [3] * 8


@pytest.mark.usefixtures("every_step")
def test_an_interrupted_step_is_not_learnt_from(models, monkeypatch):
    """The next step may be one that the companion does not score."""
    engine = scoring(models, recipe=VARIED, max_batch_size=4)
    prompts = [[1, 2, 3], [4, 2], [7, 3, 3, 1]]
    params = [SamplingParams(max_tokens=12, temperature=0)] * 3
    expected = generate(alone(models, VARIED), prompts, params)
    requests = [
        engine.add(None, prompt, each) for prompt, each in zip(prompts, params, strict=True)
    ]
    policy, verify = engine._pipeline.policies.default, engine._verifier.verify

    def interrupted(batch, plan):
        if plan.nodes is None:
            return verify(batch, plan)
        raise KeyboardInterrupt

    engine._verifier.verify = interrupted
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    engine._verifier.verify = verify
    assert policy._trees_worth is not None
    policy._has_companion = False
    learnt = []
    monkeypatch.setattr(ScoredTrees, "learn", lambda *_: learnt.append("scores"))
    monkeypatch.setattr(_CompanionValue, "observe", lambda *_: learnt.append("value"))
    while engine.num_unfinished:
        engine.step()
    assert not learnt
    assert token_ids([request.output() for request in requests]) == token_ids(expected)


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_the_companion_rests_where_its_scores_do_not_pay(models, monkeypatch, seconds):
    """Its scores leave out nodes that are not worth their price, if its pass takes no time."""
    monkeypatch.setattr(SpeculativeVerification, "_node_price", lambda *_: 0.3)
    monkeypatch.setattr(ShapeChoice, "branches", lambda self, count: True)
    engine = scoring(models, recipe=VARIED, max_batch_size=1, num_speculative_tokens=16)
    policy, found = engine._pipeline.policies.default, recorded_scores(engine)
    right = policy.observe

    def observe(outcome, times):
        policy.num_observed = getattr(policy, "num_observed", 0) + any(outcome.num_drafted)
        right(outcome, replace(times, companion=seconds, select=0.0, disturbed=False))

    policy.observe = observe
    for seed in range(8):
        prompt = [1 + seed % 5, 2, 3 + seed % 7]
        generate(engine, [prompt], [SamplingParams(max_tokens=50, temperature=0)])
    value = policy._companion_value(1, trees=True)
    assert policy.num_observed > 60
    if seconds:
        assert value.net_gain < 0
        assert 6 <= len(found) < 0.5 * policy.num_observed
    else:
        assert value.net_gain > 0


def test_a_text_without_room_for_the_largest_tree_is_not_scored(models, monkeypatch):
    """Whether a tree is scored depends on its limit, and not on the nodes that were drafted."""
    monkeypatch.setattr(_CompanionValue, "scores_step", lambda self: True)
    monkeypatch.setattr(ShapeChoice, "branches", lambda self, count: True)
    target = Recipe(vocab=16, seed=6, context=64, config={"num_hidden_layers": 2})
    companion = replace(target.draft(**COMPANION_NOISE), context=32)
    folders = [models.folder(each) for each in (target, target.draft(0.1), companion)]
    engine = assemble(*folders, 1, policy="sv", tree_width=3, num_speculative_tokens=8)
    found = recorded_scores(engine)
    generate(engine, [[1, 2, 3]], [SamplingParams(max_tokens=50, seed=1)])
    longest = max(
        len(texts[0]) for _, texts, _, scores in found if not scores.overlap.isnan().all()
    )
    assert 20 < longest <= 24
