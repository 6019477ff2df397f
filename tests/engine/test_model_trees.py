"""Token trees of copied text, of a draft model and of heads are lossless."""

from dataclasses import replace

import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.core.types import TreeDraft
from draftwise.engine.cached_model import ForwardInput, NodeInput
from draftwise.errors import InvalidParameterError
from draftwise.kernels.native import library
from draftwise.models.tree_tokens import SegmentTree
from draftwise.policies import create_policy
from draftwise.policies.base import PolicyContext, planned_drafts
from draftwise.policies.inputs import DraftPosition, RequestState

from ..levels import exhaustive_unless
from ..stand_ins import unguarded
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
KINDS = ["suffix", "model", "head", "eagle"]
MODELS = KINDS[1:]
POLICIES = ["fixed", "eagle2", "svip-tree"]
# Copied text has no entropies, which "svip-tree" reads.
KINDS_AND_POLICIES = [
    (kind, policy)
    for kind in KINDS
    for policy in POLICIES
    if kind != "suffix" or policy != "svip-tree"
]
# Its last token is continued in five ways.
BRANCHING = [4, 2, 6, 4, 4, 2, 4, 0, 0, 4, 3, 7, 4, 2, 0, 4]


def branching(models, kind, policy="fixed", max_batch_size=8, recipe=RECIPE, width=3, **settings):
    """An engine that drafts trees of copied text, with a model, or with a head of EAGLE-3 or 1."""
    settings = {"policy": policy, "tree_width": width, "num_speculative_tokens": 8} | settings
    if kind == "suffix":
        return assemble(models.folder(recipe), kind, max_batch_size=max_batch_size, **settings)
    if kind == "model":
        return assemble_recipe(models, recipe, max_batch_size, **settings)
    vocab = recipe.vocab
    heads = {
        "head": HEAD.changed(vocab=vocab, draft_vocab=vocab * 3 // 4),
        "eagle": EagleRecipe(vocab=vocab, bias=True),
    }
    return engine_with_head(models, recipe, heads[kind], max_batch_size=max_batch_size, **settings)


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


def p_value(models, engine, kind, controls, count):
    """Of the first tokens of texts of one prompt, if they follow the target's distribution.

    The texts are longer, as drafts have fewer nodes than the request has tokens left.
    """
    settings = count, BRANCHING if kind == "suffix" else [1, 2, 3], RECIPE, 0.05, 7
    return p_value_of_texts(models, engine, controls, *settings)


@pytest.mark.covering("kind", "policy", "max_batch_size")
@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 16])
@pytest.mark.parametrize(("kind", "policy"), KINDS_AND_POLICIES)
def test_texts_follow_the_target(models, kind, policy, max_batch_size):
    engine = branching(models, kind, policy, max_batch_size)
    count = 1500 if max_batch_size == 1 else 3000
    assert p_value(models, engine, kind, {}, count) > NOT_UNLIKELY


@pytest.mark.covering("kind", "controls", "max_batch_size")
@pytest.mark.slow
@pytest.mark.parametrize("max_batch_size", [1, 16])
@pytest.mark.parametrize("controls", CONTROLS)
@pytest.mark.parametrize("kind", ["suffix", "model", "head"])
def test_texts_follow_the_target_with_every_control(models, kind, controls, max_batch_size):
    engine = branching(models, kind, "fixed", max_batch_size)
    count = 1200 if max_batch_size == 1 else 2000
    assert p_value(models, engine, kind, CONTROLS[controls], count) > NOT_UNLIKELY


@pytest.mark.slow
@pytest.mark.parametrize("kind", exhaustive_unless(lambda kind: kind in ("model", "head"), MODELS))
def test_texts_follow_the_target_without_kernels(models, kind, monkeypatch):
    """PyTorch's operations find the children and follow the paths, as on a GPU."""
    monkeypatch.setattr(library, "_load", lambda: (None, "left out"))
    engine = branching(models, kind, "eagle2", 16)
    assert p_value(models, engine, kind, {}, 2000) > NOT_UNLIKELY


@pytest.mark.covering("kind", "policy")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", MODELS)
def test_texts_are_those_without_drafts(models, kind, policy):
    """Greedy and with seeds, at any batch size and number of nodes."""
    prompts, params = greedy_and_sampled_work()
    expected = generate(alone(models, VARIED), prompts, params)
    for max_batch_size, nodes in ((1, 3), (16, 40)):
        engine = branching(
            models, kind, policy, max_batch_size, VARIED, num_speculative_tokens=nodes
        )
        outputs = generate(engine, prompts, params)
        assert token_ids(outputs) == token_ids(expected)
        assert sum(output.speculation.num_accepted for output in outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_the_targets_on_100_prompts(models, kind):
    recipe = Recipe(vocab=32, seed=9, context=96, config={"num_hidden_layers": 2})
    prompts = [[(7 * i + j * j * (1 + i % 3)) % 31 for j in range(2 + i % 40)] for i in range(100)]
    params = [SamplingParams(max_tokens=40, temperature=0)] * len(prompts)
    expected = generate(alone(models, recipe), prompts, params)
    engine = branching(models, kind, "eagle2", 16, recipe, 4, num_speculative_tokens=16)
    assert token_ids(generate(engine, prompts, params)) == token_ids(expected)


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
@pytest.mark.parametrize("kind", MODELS)
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
    """At temperature 0."""
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
    trees = [draft for draft in drafts if isinstance(draft, TreeDraft) and any(draft.lengths)]
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


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}])
def test_requests_whose_tokens_are_controlled_get_chains(models, params):
    engine = branching(models, "head", "svip-tree", 4, VARIED)
    drafts = recorded(engine)
    prompts = [[1, 2, 3]] * 4
    outputs = generate(engine, prompts, [SamplingParams(max_tokens=3, **params)] * 4)
    assert sum(output.speculation.num_drafted for output in outputs) > 0
    assert not any(isinstance(draft, TreeDraft) for draft in drafts)


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
    for draft in ("target:exit=1", "ngram"):
        with pytest.raises(InvalidParameterError, match="token trees come from 'suffix'") as error:
            LLM(folder, unguarded(draft, policy="fixed", tree_width=2), dtype="float32")
        assert error.value.field == "tree_width"


def test_several_drafts_and_a_companion_draft_no_trees(models):
    folder, draft = models.folder(RECIPE), models.folder(RECIPE.draft(0.1))
    llm = LLM(folder, dtype="float32")
    with pytest.raises(InvalidParameterError, match="tree_width: several drafts are chains"):
        llm.with_speculation(unguarded(["suffix", draft], policy="fixed", tree_width=2))
    settings = {"companion": draft, "policy": "staged", "tree_width": 2}
    with pytest.raises(InvalidParameterError, match="tree_width: a companion scores chains only"):
        llm.with_speculation(unguarded(draft, **settings))


def test_a_target_with_chunked_attention_gets_no_trees(models):
    llm = LLM(models.folder(RECIPE), dtype="float32")
    layers = llm.target.model.layers
    layers[1] = replace(layers[1], chunk=16)
    with pytest.raises(InvalidParameterError, match="tree_width: the target attends to chunks"):
        llm.with_speculation(unguarded("suffix", policy="fixed", tree_width=2))


class TestPolicies:
    def level(self, num_nodes, depth=1, entropy=None):
        entropy = None if entropy is None else torch.tensor(entropy)
        tokens = torch.zeros(num_nodes, dtype=torch.long)
        return DraftPosition(depth - 1, [0] * num_nodes, tokens, None, entropy, None)

    def test_eagle2_stops_at_its_depth(self):
        policy = create_policy("eagle2", PolicyContext(8), {"depth": 3})
        assert policy.keep_drafting(self.level(2, 2)).tolist() == [True, True]
        assert policy.keep_drafting(self.level(2, 3)).tolist() == [False, False]

    def test_svip_tree_stops_where_the_draft_is_unsure(self):
        policy = create_policy("svip-tree", PolicyContext(8), {"threshold": 1.0})
        level = self.level(3, entropy=[0.2, 1.5, 1.0])
        assert policy.keep_drafting(level).tolist() == [True, False, True]

    def test_chains_beside_continuations_may_come_from_the_model(self):
        policy = create_policy("eagle2", PolicyContext(8), {"depth": 4})
        request = RequestState(20, 4, 8, history=0.5)
        states = [request, request._replace(offer=(0.9,) * 8), request._replace(has_model=False)]
        states[2] = states[2]._replace(offer=(0.5,) * 8)
        plan = planned_drafts(policy, states)
        assert plan.copies == [False, True, True]
        assert plan.lengths == [8, 8, 8]
        for place in range(4):
            assert policy.keep_drafting(self.level(1, place + 1)).tolist() == [place < 3]
