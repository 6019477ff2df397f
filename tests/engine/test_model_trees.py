"""Token trees of a draft model and of heads are lossless, likely ones and drawn ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftwise import LLM, RequestSpeculation, SamplingParams, SpeculationConfig
from draftwise.core.types import TreeProbs
from draftwise.engine import tree_acceptance
from draftwise.engine.cached_model import ForwardInput, NodeInput
from draftwise.engine.proposers import drafted_trees
from draftwise.engine.proposers.growing_tree import CopiedToken, GrowingTree
from draftwise.engine.proposers.token_trees import TreeDrafting
from draftwise.errors import InvalidParameterError
from draftwise.models.native import library
from draftwise.models.native import trees as native_trees
from draftwise.models.tree_tokens import SegmentTree
from draftwise.policies import create_policy
from draftwise.policies.base import PolicyContext
from draftwise.policies.inputs import RequestState, TreeLevel

from ..levels import exhaustive_unless
from ..stand_ins import FixedLatency, fixed_latency
from ..tiny_eagle_heads import EagleRecipe
from ..tiny_heads import HeadRecipe
from ..tiny_models import Recipe
from .assembly import assemble, assemble_recipe, generate, token_ids, varied_work
from .heads import engine_with_head
from .test_proposers import NOT_UNLIKELY
from .test_text_proposers import CONTROLS
from .test_text_proposers import p_value as p_value_of_texts

RECIPE = Recipe(vocab=8, seed=3, config={"num_hidden_layers": 2})
VARIED = Recipe(vocab=16, seed=6, config={"num_hidden_layers": 2})
HEAD = HeadRecipe(layers=(0, 1), draft_vocab=6, settings={"norm_before_residual": True})
# Trees of a draft model and of heads, and of two of them with copied tokens as a branch.
KINDS = ["model", "head", "eagle", "copies and model", "copies and head"]
# Its last three tokens occur earlier.
REPEATING = [4, 3, 1, 5, 7, 4, 3, 1, 7, 6, 4, 3, 1]
POLICIES = ["fixed", "adaptive", "eagle2", "svip-tree"]


def branching(models, kind, policy="fixed", max_batch_size=8, recipe=RECIPE, width=3, **settings):
    """An engine that drafts trees with a model, or with a head of EAGLE-3 or of EAGLE-1."""
    settings = {"policy": policy, "tree_width": width, "num_speculative_tokens": 8} | settings
    if kind == "model":
        return assemble_recipe(models, recipe, max_batch_size, **settings)
    if kind == "copies and model":
        draft = ["suffix", models.folder(recipe.draft(0.1))]
        return assemble(models.folder(recipe), draft, None, max_batch_size, **settings)
    if kind == "copies and head":
        settings["drafts"] = ("suffix",)
    vocab = recipe.vocab
    heads = {
        "head": HEAD.changed(vocab=vocab, draft_vocab=vocab * 3 // 4),
        "eagle": EagleRecipe(vocab=vocab, bias=True),
    }
    head = heads[kind.removeprefix("copies and ")]
    return engine_with_head(models, recipe, head, max_batch_size=max_batch_size, **settings)


def alone(models, recipe=RECIPE, max_batch_size=8):
    return assemble_recipe(models, recipe, max_batch_size, policy="none")


def greedy_and_sampled_work():
    """Prompts of many lengths with their sampling parameters; some are greedy."""
    prompts = [[7, *prompt] for prompt in varied_work(24)[0]]
    params = [
        SamplingParams(max_tokens=4 + i % 9, temperature=float(i % 3 == 0), seed=i)
        for i in range(24)
    ]
    return prompts, params


def assert_greedy_texts(params, outputs, expected):
    """The texts of greedy requests are the expected ones."""
    for each, output, other in zip(params, outputs, expected, strict=True):
        if each.temperature == 0:
            assert output.token_ids == other.token_ids


def p_value(models, engine, controls, count, least_accepted=0.05, prompt=(1, 2, 3)):
    """Of the first tokens of texts of one prompt, if they follow the target's distribution.

    The texts are longer, as drafts have fewer nodes than the request has tokens left.
    """
    settings = count, list(prompt), RECIPE, least_accepted, 7
    return p_value_of_texts(models, engine, controls, *settings)


@pytest.mark.covering("kind", "policy", "max_batch_size")
@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 16])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_follow_the_target(models, kind, policy, max_batch_size):
    engine = branching(models, kind, policy, max_batch_size)
    # This policy drafts less where drafts are often rejected.
    least_accepted = 0.01 if policy == "adaptive" else 0.05
    prompt = REPEATING if kind.startswith("copies") else (1, 2, 3)
    count = 1500 if max_batch_size == 1 else 3000
    assert p_value(models, engine, {}, count, least_accepted, prompt) > NOT_UNLIKELY


@pytest.mark.covering("kind", "controls", "max_batch_size")
@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 16])
@pytest.mark.parametrize("controls", CONTROLS)
@pytest.mark.parametrize("kind", ["model", "head", "copies and head"])
def test_texts_follow_the_target_with_every_control(models, kind, controls, max_batch_size):
    engine = branching(models, kind, "fixed", max_batch_size)
    prompt = REPEATING if kind.startswith("copies") else (1, 2, 3)
    count = 1200 if max_batch_size == 1 else 2000
    assert p_value(models, engine, CONTROLS[controls], count, prompt=prompt) > NOT_UNLIKELY


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", exhaustive_unless(lambda kind: kind in ("model", "copies and head"), KINDS)
)
def test_texts_follow_the_target_without_kernels(models, kind, monkeypatch):
    """PyTorch's operations draw the children and test them, as on a GPU."""
    monkeypatch.setattr(library, "_load", lambda: (None, "left out"))
    engine = branching(models, kind, "eagle2", 16)
    prompt = REPEATING if kind.startswith("copies") else (1, 2, 3)
    assert p_value(models, engine, {}, 2000, prompt=prompt) > NOT_UNLIKELY


@pytest.mark.slow
def test_verifying_only_likely_children_is_noticed(models, monkeypatch):
    """Whether a drawn child is verified must not depend on its token."""
    right = drafted_trees.DraftedTrees.draft

    def biased(self, lengths, *arguments):
        draft = right(self, lengths, *arguments)
        kept = [
            next((at for at, token in enumerate(tokens[:length]) if token > 4), length)
            for tokens, length in zip(draft.host_tokens, draft.lengths, strict=True)
        ]
        return replace(draft, lengths=tuple(kept))

    monkeypatch.setattr(drafted_trees.DraftedTrees, "draft", biased)
    engine = branching(models, "model", max_batch_size=64)
    assert p_value(models, engine, {}, 6000) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False])
def test_testing_a_copied_token_like_a_drawn_one_is_noticed(models, kernels, monkeypatch):
    right = tree_acceptance._test_drawn if not kernels else native_trees.accept_trees

    def biased(*arguments):
        wrong = [
            replace(each, rows=[[max(row, 0) for row in own] for own in each.rows])
            if isinstance(each, TreeProbs)
            else each
            for each in arguments
        ]
        return right(*wrong)

    if kernels:
        monkeypatch.setattr(native_trees, "accept_trees", biased)
    else:
        monkeypatch.setattr(tree_acceptance, "_test_drawn", biased)
        monkeypatch.setattr(tree_acceptance, "library_for", lambda device: None)
    engine = branching(models, "copies and model", max_batch_size=64)
    assert p_value(models, engine, {}, 6000, prompt=REPEATING) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["copies and model", "copies and head"])
def test_a_draft_may_be_certain_of_a_copied_token(models, monkeypatch, kind):
    """Rounding leaves nothing beside it, and the other children are drawn all the same."""
    right = TreeDrafting._add_children

    def certain(self, growth, logits, reading):
        ids = self._model.target_tokens(torch.arange(logits.shape[1]))
        copied = [tree.copied_child(node) for tree, nodes in reading for node in nodes]
        tokens = torch.tensor([-1 if each is None else each.token for each in copied])
        return right(self, growth, logits + 40.0 * (ids == tokens.unsqueeze(1)), reading)

    monkeypatch.setattr(TreeDrafting, "_add_children", certain)
    engine = branching(models, kind, max_batch_size=64)
    assert p_value(models, engine, {}, 6000, prompt=REPEATING) > NOT_UNLIKELY


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_those_without_drafts(models, kind, policy):
    """At any batch size and number of nodes, also beside requests whose trees are drawn."""
    prompts, params = greedy_and_sampled_work()
    expected = generate(alone(models, VARIED), prompts, params)
    for max_batch_size, nodes in ((1, 3), (4, 12), (16, 40)):
        engine = branching(
            models, kind, policy, max_batch_size, VARIED, num_speculative_tokens=nodes
        )
        outputs = generate(engine, prompts, params)
        assert_greedy_texts(params, outputs, expected)
        assert sum(output.speculation.num_accepted for output in outputs) > 0


@pytest.mark.parametrize("kind", ["model", "head", "eagle"])
@pytest.mark.parametrize("policy", ["fixed", "eagle2", "svip-tree"])
def test_a_seed_reproduces_its_text_at_any_batch_size(models, kind, policy):
    prompts = [[7, *prompt] for prompt in varied_work(24)[0]]
    params = [SamplingParams(max_tokens=4 + i % 9, seed=i) for i in range(24)]
    texts = []
    for max_batch_size in (1, 5, 16):
        engine = branching(models, kind, policy, max_batch_size, VARIED, num_speculative_tokens=12)
        texts.append(token_ids(generate(engine, prompts, params)))
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_the_targets_on_100_prompts(models, kind):
    recipe = Recipe(vocab=32, seed=9, context=96, config={"num_hidden_layers": 2})
    prompts = [[(7 * i + j * j * (1 + i % 3)) % 31 for j in range(2 + i % 40)] for i in range(100)]
    params = [SamplingParams(max_tokens=40, temperature=0)] * len(prompts)
    expected = generate(alone(models, recipe), prompts, params)
    for policy in ("eagle2", "adaptive"):
        engine = branching(models, kind, policy, 16, recipe, 4, num_speculative_tokens=16)
        outputs = generate(engine, prompts, params)
        assert token_ids(outputs) == token_ids(expected)


def logits_along(model, request, path):
    """The logits after each token of a path that is read as a chain, over the own vocabulary."""
    slot = request.cache_slot
    model.cache.truncate(slot, model.text_end(request, len(request.tokens) - 1))
    model.read_roots([ForwardInput(request, len(request.tokens), num_logits=1)])
    found, start = [], model.cache.lengths[slot]
    for place, token in enumerate(path, 1):
        tree = SegmentTree(start - 1, [place], [(2 << place) - 1])
        found.append(model.read_nodes([NodeInput(slot, [token], tree, [0])])[0].clone())
    return found


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("kind", ["model", "head", "eagle"])
def test_each_node_reads_its_own_path(models, kind, kernels, monkeypatch):
    """The distribution at a node is that of a chain with the same tokens."""
    if not kernels:
        monkeypatch.setattr(library, "_load", lambda: (None, "left out"))
    engine = branching(models, kind, recipe=VARIED)
    request = engine.add(None, [3, 1, 2, 5, 4], SamplingParams(max_tokens=8, temperature=0))
    for _ in range(2):
        engine.step()
    model = engine._pipeline.proposer.cached_model
    slot = request.cache_slot
    model.cache.truncate(slot, model.text_end(request, len(request.tokens) - 1))
    model.read_roots([ForwardInput(request, len(request.tokens), num_logits=1)])
    root = model.cache.lengths[slot] - 1
    first = SegmentTree(root, [1, 1], [0b11, 0b101])
    above = model.read_nodes([NodeInput(slot, [3, 6], first, [0, 0])]).clone()
    second = SegmentTree(root, [2, 2, 2], [0b1101, 0b10011, 0b100101])
    below = model.read_nodes([NodeInput(slot, [1, 2, 6], second, [1, 0, 1])]).clone()
    paths = {(3,): above[0], (6,): above[1], (6, 1): below[0], (3, 2): below[1], (6, 6): below[2]}
    for path, logits in paths.items():
        expected = logits_along(model, request, path)[-1]
        assert torch.allclose(logits, expected, atol=1e-4), path


def test_a_tree_accepts_more_than_a_chain_of_as_many_passes(models):
    """At temperature 0. Chains that are drawn accept more than trees where the draft is good."""
    prompts = [[1 + i % 3, 2, 3 + i % 5] for i in range(40)]
    params = [SamplingParams(max_tokens=20, temperature=0)] * 40
    chain = branching(models, "model", "fixed", 16, VARIED, width=1, num_speculative_tokens=4)
    options = {"policy_options": {"depth": 4}, "num_speculative_tokens": 40}
    tree = branching(models, "model", "eagle2", 16, VARIED, **options)
    outputs = [generate(engine, prompts, params) for engine in (chain, tree)]
    assert token_ids(outputs[0]) == token_ids(outputs[1])
    steps = [sum(output.speculation.num_steps for output in each) for each in outputs]
    assert steps[1] < 0.9 * steps[0]


def recorded(engine):
    """A list to which every draft of an engine is added."""
    found, right = [], engine._pipeline.proposer.propose

    def propose(batch, policy):
        draft = right(batch, policy)
        found.append(draft)
        return draft

    engine._pipeline.proposer.propose = propose
    return found


def test_trees_are_bounded_and_the_most_valuable_nodes_come_first(models):
    engine = branching(models, "model", "eagle2", 4, VARIED, num_speculative_tokens=10)
    drafts = recorded(engine)
    prompts = [[1, 2, 3]] * 4
    generate(engine, prompts, [SamplingParams(max_tokens=20, seed=i) for i in range(4)])
    trees = [draft for draft in drafts if draft.parents is not None]
    assert trees
    for draft in trees:
        assert max(draft.lengths) <= 10
        assert draft.passes is not None
        assert len(draft.passes) <= 6
        for parents, length in zip(draft.parents.tolist(), draft.lengths, strict=True):
            assert all(-1 <= parent < node for node, parent in enumerate(parents[:length]))
            for node in range(length):
                siblings = [at for at in range(length) if parents[at] == parents[node]]
                assert len(siblings) <= 3
    assert any(len(set(draft.parents[0].tolist())) < draft.lengths[0] for draft in trees)


@pytest.mark.parametrize("kind", ["model", "copies and head"])
def test_no_child_is_planned_that_the_filters_leave_nothing_for(models, kind, monkeypatch):
    """With few tokens left by top-k, trees are narrower and deeper."""
    trees, proposed = [], GrowingTree.proposed
    monkeypatch.setattr(
        GrowingTree, "proposed", lambda tree, *order: trees.append(tree) or proposed(tree, *order)
    )
    engine = branching(models, kind, "fixed", 4, VARIED)
    params = [SamplingParams(max_tokens=20, top_k=1 + i % 2, seed=i) for i in range(8)]
    generate(engine, [REPEATING] * 8, params)
    drawn = [[node for node in tree.nodes if node.rank >= 0] for tree in trees]
    assert all(tree.num_drawn == len(own) for tree, own in zip(trees, drawn, strict=True))
    assert max(node.depth for own in drawn for node in own) > 4


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}])
def test_requests_whose_tokens_are_controlled_get_chains(models, params):
    engine = branching(models, "head", "svip-tree", 4, VARIED)
    drafts = recorded(engine)
    prompts = [[1, 2, 3]] * 4
    outputs = generate(engine, prompts, [SamplingParams(max_tokens=3, **params)] * 4)
    assert sum(output.speculation.num_drafted for output in outputs) > 0
    assert all(draft.parents is None for draft in drafts)


def test_accepted_tokens_are_the_drafts(models):
    """They are not marked as copied, although they are proposed with certainty."""
    engine = branching(models, "model", "fixed", 4, VARIED)
    request = engine.add(None, [1, 2, 3], SamplingParams(max_tokens=20, temperature=0))
    while engine.num_unfinished:
        engine.step()
    sources = {str(source) for source in request.output().token_sources}
    assert "draft" in sources
    assert "copy" not in sources


def test_a_request_goes_on_after_a_step_that_failed(models):
    prompts = [[1, 2, 3], [4, 2], [7, 3, 3, 1]]
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in range(3)]
    expected = generate(branching(models, "model", "fixed", 4, VARIED), prompts, params)
    engine = branching(models, "model", "fixed", 4, VARIED)
    verify, plans = engine._verifier.verify, []

    def failing(batch, plan):
        plans.append(plan)
        if len(plans) == 4:
            raise KeyboardInterrupt
        return verify(batch, plan)

    engine._verifier.verify = failing
    requests = [
        engine.add(None, prompt, each) for prompt, each in zip(prompts, params, strict=True)
    ]
    for _ in range(3):
        engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.num_unfinished:
        engine.step()
    assert token_ids([request.output() for request in requests]) == token_ids(expected)
    assert len(plans) > 4


def test_what_cannot_draft_trees_is_refused(models):
    folder = models.folder(RECIPE)
    for draft in (["suffix", "target:exit=1"], "target:exit=1", "ngram"):
        with pytest.raises(InvalidParameterError, match="token trees come from 'suffix'") as error:
            LLM(folder, SpeculationConfig(draft, policy="fixed", tree_width=2), dtype="float32")
        assert error.value.field == "tree_width"


def test_a_target_with_chunked_attention_gets_no_trees(models):
    llm = LLM(models.folder(RECIPE), dtype="float32")
    layers = llm.target.model.layers
    layers[1] = replace(layers[1], chunk=16)
    with pytest.raises(InvalidParameterError, match="tree_width: the target attends to chunks"):
        llm.with_speculation(SpeculationConfig("suffix", policy="fixed", tree_width=2))


def test_a_copied_branch_and_the_trees_of_the_model_are_one_tree(models):
    engine = branching(models, "copies and model", "eagle2", 4, VARIED, num_speculative_tokens=24)
    drafts = recorded(engine)
    prompts = [[*range(16), *range(i, 16)] for i in range(4)]  # each token occurs
    params = [SamplingParams(max_tokens=30, temperature=i % 2, seed=i) for i in range(4)]
    generate(engine, prompts, params)
    first = next(draft for draft in drafts if any(draft.lengths))
    assert first.tree_probs is not None
    rows = zip(first.host_tokens, first.parents.tolist(), first.lengths, strict=True)
    for request, (tokens, parents, length) in enumerate(rows):
        own = first.tree_probs.rows[request]
        assert bool(own) == bool(request % 2)
        if own:
            copied = [node for node, row in enumerate(own) if row < 0]
            assert len(copied) > 1
            # The branch is a path from the root, and each of its tokens is a first child.
            assert [parents[node] for node in copied] == [-1, *copied[:-1]]
            assert all(parents.index(parents[node]) == node for node in copied)
            for node in copied:
                siblings = [at for at in range(length) if parents[at] == parents[node]]
                assert sum(tokens[at] == tokens[node] for at in siblings) == 1


def test_a_request_may_ask_for_copies_alone(models):
    engine = branching(models, "copies and model", "eagle2", 4, VARIED)
    drafts = recorded(engine)
    request = engine.add(
        None,
        [1, 5, 2, 8, 1, 5, 2],
        SamplingParams(max_tokens=12, temperature=0),
        RequestSpeculation(draft="suffix"),
    )
    while engine.num_unfinished:
        engine.step()
    trees = [draft for draft in drafts if any(draft.lengths)]
    assert trees
    assert all(not draft.drafting for draft in trees)
    sources = {str(source) for source in request.output().token_sources}
    assert "draft" not in sources


def test_copied_tokens_and_those_of_the_model_are_told_apart(models):
    engine = branching(models, "copies and model", "eagle2", 4, VARIED, num_speculative_tokens=24)
    drafts, requests = recorded(engine), []
    for seed in range(8):
        params = SamplingParams(max_tokens=30, temperature=seed % 2, seed=seed)
        requests.append(engine.add(None, [*range(16), *range(seed, 16)], params))
    while engine.num_unfinished:
        engine.step()
    assert any(draft.passes and any(draft.copied_nodes) for draft in drafts)
    sources = {str(each) for request in requests for each in request.output().token_sources}
    assert {"copy", "draft"} <= sources


class TestGrowingTree:
    COPIED = (CopiedToken(7, 0.5), CopiedToken(8, 0.4), CopiedToken(9, 0.5))

    def grown(self, greedy=True, copied=COPIED, max_nodes=8):
        tree = GrowingTree(0, greedy, max_nodes, 16, copied)
        tree.was_read([-1], 0)
        return tree

    def test_a_copied_token_is_the_first_child_of_the_one_before(self):
        tree = self.grown()
        tree.add(-1, [3, 4], [0.6, 0.2], [0.35, 0.1], 0.0)
        assert [node.token for node in tree.nodes] == [7, 3, 4]
        # After the copied token the model adds something only where the next copied one is wrong.
        assert tree.best_newest(1) == [1]
        assert tree.best_newest(2) == [0, 1]
        tree.was_read([1], 5)
        tree.add(1, [6], [0.9], [0.8], 0.0)
        assert [(n.token, n.parent, n.depth) for n in tree.nodes[3:]] == [(8, 0, 2), (6, 1, 2)]

    def test_the_rest_of_the_copy_is_added_at_the_end(self):
        tree = self.grown()
        tree.add(-1, [3], [0.6], [0.3], 0.0)
        proposed = tree.proposed(tree.order())
        assert proposed.tokens == [7, 3, 8, 9]
        assert proposed.parents == [-1, -1, 0, 2]
        assert list(proposed.values) == pytest.approx([0.5, 0.3, 0.2, 0.1])

    def test_a_token_that_the_model_proposes_too_is_one_node(self):
        tree = self.grown()
        tree.add(-1, [7, 3], [0.8, 0.1], [0.7, 0.1], 0.0)
        assert [(node.token, node.value) for node in tree.nodes] == [(7, 0.7), (3, 0.1)]

    def test_drawn_nodes_leave_room_for_the_copy(self):
        tree = self.grown(greedy=False, max_nodes=4)
        assert sum(tree.children_to_draw([-1], [[0.5, 0.2, 0.1]], 0.0)) == 1
        assert sum(self.grown(False, (), 24).children_to_draw([-1], [[0.5, 0.2]], 0.0)) == 2


class TestPolicies:
    def level(self, values, depth=1, entropy=None, coverage=0.8):
        return TreeLevel(
            depth,
            [0] * len(values),
            np.array(values),
            None if entropy is None else np.array(entropy),
            coverage,
            len(values),
        )

    def test_eagle2_stops_at_its_depth(self):
        policy = create_policy("eagle2", PolicyContext(8), {"depth": 3})
        assert policy.grow_trees(self.level([0.5, 0.1], 2)).tolist() == [True, True]
        assert policy.grow_trees(self.level([0.5, 0.1], 3)).tolist() == [False, False]

    def test_svip_tree_stops_where_the_draft_is_unsure(self):
        policy = create_policy("svip-tree", PolicyContext(8), {"threshold": 1.0})
        level = self.level([0.5, 0.5, 0.5], entropy=[0.2, 1.5, 1.0])
        assert policy.grow_trees(level).tolist() == [True, False, True]

    def test_adaptive_weighs_a_pass_against_what_its_nodes_save(self):
        states = [RequestState(20, 4, 8, index) for index in range(2)]
        policy = create_policy("adaptive", PolicyContext(8, fixed_latency(), drafts_trees=True), {})
        assert policy.looks_for_offers(states)
        assert policy.grow_trees(self.level([0.9, 0.8])).tolist() == [True, True]
        assert not policy.grow_trees(self.level([0.01, 0.005])).any()
        assert not policy.grow_trees(self.level([0.9, 0.8], coverage=0.001)).any()

    def test_the_first_pass_must_also_be_worth_what_it_takes_beyond_the_others(self):
        latency = fixed_latency()
        slow = FixedLatency(latency.target, replace(latency.draft, first_extra=1.0))
        states = [RequestState(20, 4, 8, index) for index in range(2)]
        grown = []
        for costs in (latency, slow):
            policy = create_policy("adaptive", PolicyContext(8, costs, drafts_trees=True), {})
            policy.looks_for_offers(states)
            grown += [policy.grow_trees(self.level([0.9, 0.8], depth)).any() for depth in (0, 1)]
        assert grown == [True, True, False, True]

    def test_chains_beside_continuations_may_come_from_the_model(self):
        policy = create_policy("eagle2", PolicyContext(8), {"depth": 4})
        request = RequestState(20, 4, 8, history=0.5)
        states = [request, request._replace(offer=(0.9,) * 8), request._replace(has_model=False)]
        choices = policy.plan_drafts(states)
        assert [choice.uses_offer for choice in choices] == [False, True, True]
        assert [choice.length for choice in choices] == [4, 4, 8]
