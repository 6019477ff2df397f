"""Token trees in the engine: lossless, and the same text for a seed as without drafts."""

import numpy as np
import pytest
import torch

from draftwise import LLM, SamplingParams
from draftwise.core.trees import accept_drawn_path
from draftwise.core.types import Plan, TreeDraft
from draftwise.engine import tree_acceptance, tree_paths
from draftwise.engine.suffix.branching import find_tree
from draftwise.engine.suffix.search import find_continuation
from draftwise.errors import InvalidParameterError
from draftwise.estimators.matches import MatchAcceptance
from draftwise.models import tree_tokens
from draftwise.speculation import RequestSpeculation

from ..architectures import ALL, CONTEXT, PROMPTS, continuation
from ..refusals import error_of
from ..stand_ins import unguarded
from .assembly import generate, token_ids, varied_work
from .test_model_trees import BRANCHING, recorded
from .test_proposers import RECIPE, VARIED, build
from .test_text_proposers import p_value


def branching(models, recipe, policy, max_batch_size, **settings):
    return build(models, recipe, policy, max_batch_size, draft="suffix", tree_width=4, **settings)


@pytest.mark.slow
def test_a_walk_that_prefers_children_is_noticed(models, monkeypatch):
    """This walk sometimes takes a child where the token drawn at the root is none."""
    right = tree_paths.accepted_nodes
    uniforms = np.random.default_rng(0)

    def biased(plan, drawn):
        drawn = list(drawn)
        first = 0
        for tokens, length in zip(plan.host_tokens, plan.lengths, strict=True):
            if length and drawn[first] not in tokens[:length] and uniforms.random() < 0.4:
                drawn[first] = tokens[0]
            first += length + 1
        return right(plan, drawn)

    monkeypatch.setattr(tree_acceptance, "accepted_nodes", biased)
    monkeypatch.setattr(tree_acceptance, "library_for", lambda device: None)
    engine = branching(models, RECIPE, "fixed", 64)
    assert p_value(models, engine, {}, 6000, BRANCHING, max_tokens=7) < 1e-6


@pytest.mark.parametrize("policy", ["fixed", "eagle2"])
def test_a_seed_gives_the_same_text_as_without_drafts(models, policy):
    """Sampled, greedy and penalised, at any batch size and number of nodes."""
    prompts, params = varied_work(30)
    prompts = [[*prompt, *prompt] for prompt in prompts]
    expected = generate(build(models, VARIED, "none", 8, draft="none"), prompts, params)
    for max_batch_size in (1, 16):
        engine = branching(models, VARIED, policy, max_batch_size)
        for num_speculative_tokens in (3, 30):
            engine.change_speculation(num_speculative_tokens=num_speculative_tokens)
            outputs = generate(engine, prompts, params)
            assert token_ids(outputs) == token_ids(expected)
            assert sum(output.speculation.num_accepted for output in outputs) > 0


def test_nodes_that_attend_to_their_siblings_are_noticed(models, monkeypatch):
    """The same comparison fails with the attention mask of a chain."""
    right = tree_tokens.whole_tree

    def wrong(start, parents):
        tree = right(start, parents)
        return tree._replace(ancestors=[(2 << place) - 1 for place in range(len(tree.depths))])

    monkeypatch.setattr(tree_tokens, "whole_tree", wrong)
    prompts, params = varied_work(60)
    prompts = [[*prompt, *prompt] for prompt in prompts]
    expected = generate(build(models, VARIED, "none", 8, draft="none"), prompts, params)
    engine = branching(models, VARIED, "fixed", 8)
    engine.change_speculation(num_speculative_tokens=12)
    assert token_ids(generate(engine, prompts, params)) != token_ids(expected)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "mistral"])
def test_greedy_texts_beyond_the_window_equal_those_of_transformers(models, family):
    llm = LLM(
        models.folder(ALL[family]),
        unguarded("suffix", policy="fixed", num_speculative_tokens=12, tree_width=3),
        dtype="float32",
        max_batch_size=4,
        max_chunk_tokens=16,
    )
    indices = [3, 9, 12]
    params = SamplingParams(temperature=0, max_tokens=60)
    outputs = llm.generate([PROMPTS[index] for index in indices], params)
    for index, output in zip(indices, outputs, strict=True):
        assert output.token_ids == continuation(models, family, index)
    assert sum(output.speculation.num_accepted for output in outputs) > 0
    assert llm.engine._verifier._cache.sizes[0] < CONTEXT


def test_a_tree_accepts_more_than_a_chain_of_as_many_tokens(models):
    """Where the last occurrences continue in several ways, a chain can follow only one of them."""
    prompts = [BRANCHING] * 60
    params = [SamplingParams(max_tokens=8, seed=seed) for seed in range(60)]
    chain = generate(build(models, RECIPE, "fixed", 16, draft="suffix"), prompts, params)
    tree = generate(branching(models, RECIPE, "fixed", 16), prompts, params)
    assert token_ids(chain) == token_ids(tree)
    steps = [sum(output.speculation.num_steps for output in each) for each in (chain, tree)]
    assert steps[1] < 0.97 * steps[0]


def test_log_probabilities_are_those_of_the_accepted_path(models):
    prompts = [BRANCHING, [1, 2, 3], BRANCHING[3:]] * 3
    params = [
        SamplingParams(max_tokens=12, seed=seed, logprobs=2, repetition_penalty=1.0 + seed % 2)
        for seed in range(len(prompts))
    ]
    expected = generate(build(models, RECIPE, "none", 4, draft="none"), prompts, params)
    outputs = generate(branching(models, RECIPE, "fixed", 4), prompts, params)
    for output, other in zip(outputs, expected, strict=True):
        assert output.token_ids == other.token_ids
        for ours, theirs in zip(output.logprobs, other.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_stop_strings_and_limits_end_a_path(models):
    prompts = [BRANCHING] * 20
    params = [
        SamplingParams(max_tokens=1 + seed % 5, seed=seed, stop_token_ids=[3]) for seed in range(20)
    ]
    expected = generate(build(models, RECIPE, "none", 4, draft="none"), prompts, params)
    outputs = generate(branching(models, RECIPE, "fixed", 4), prompts, params)
    assert token_ids(outputs) == token_ids(expected)
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in expected]


def test_a_failing_request_leaves_the_others_alone(models):
    """Logits that are not numbers end their own request only."""
    engine = branching(models, VARIED, "fixed", 4)
    prompts, params = [[1, 2, 3] * 4] * 3, [SamplingParams(max_tokens=10, temperature=0)] * 3
    expected = generate(engine, prompts, params)
    forward = engine._verifier._model.forward

    def broken(cache, tokens, segments, *arguments, **options):
        logits = forward(cache, tokens, segments, *arguments, **options)
        of_trees = logits is not None and len(logits) == len(tokens) and len(segments) > 1
        if of_trees and segments[1].num_tokens > 2:
            logits[segments[0].num_tokens] = float("nan")
        return logits

    engine._verifier._model.forward = broken
    outputs = generate(engine, prompts, params)
    assert {output.finish_reason.value for output in outputs} == {"length", "error"}
    for output, other in zip(outputs, expected, strict=True):
        if output.error is None:
            assert output.token_ids == other.token_ids


class TestSearch:
    def tree(self, text, max_nodes=12, max_children=4, acceptance=None):
        acceptance = acceptance or MatchAcceptance()
        tokens = np.array(text, dtype=np.int32)
        return find_tree(tokens, 0, None, max_nodes, max_children, acceptance, False)

    def paths(self, tree):
        found = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            found.append([*(found[parent] if parent >= 0 else []), token])
        return found

    def test_branches_are_the_continuations_of_the_matches(self):
        tree = self.tree([7, 1, 2, 8, 1, 2, 9, 1, 2])
        paths = self.paths(tree)
        assert [8] in paths
        assert [9] in paths
        assert [9, 1, 2] in paths
        assert [8, 1, 2, 9] in paths
        assert tree.values == sorted(tree.values, reverse=True)
        assert len(tree.tokens) == 12

    def test_with_one_child_it_is_the_continuation_with_the_largest_share(self):
        text = [5, 1, 2, 3, 4, 1, 2, 3, 6, 1, 2, 3, 4, 9, 1, 2, 3]
        tree = self.tree(text, 6, 1)
        assert tree.parents == [-1, 0, 1, 2, 3, 4]
        chain = find_continuation(np.array(text, dtype=np.int32), 0, None, 6)
        assert tree.tokens == chain.tokens.tolist()
        shares, votes, lengths, _ = zip(*tree.evidence, strict=True)
        assert shares == pytest.approx(chain.shares.tolist())
        assert list(votes) == chain.votes.tolist()
        assert lengths[0] == chain.match_length
        estimates = MatchAcceptance().predict(
            np.array([False]),
            chain.shares[None],
            chain.votes[None],
            np.array([chain.match_length]),
            np.array([False]),
        )
        assert tree.values == pytest.approx(np.cumprod(estimates[0]).tolist())

    def test_a_new_token_has_no_tree(self):
        assert not self.tree([1, 2, 3]).tokens
        assert not self.tree([1, 1], max_nodes=0).tokens

    def test_the_nodes_next_to_the_gained_path_are_known(self):
        tree = [4, 5, 6, 7, 8, 9], [-1, -1, 1, 1, 2, 0]
        assert tree_paths.known_nodes(*tree, [5, 7, 1]) == (
            [0, 1, 2, 3],
            [False, True, False, True],
        )
        assert tree_paths.known_nodes(*tree, [5, 6, 8, 3]) == (
            [0, 1, 2, 3, 4],
            [False, True, True, False, True],
        )
        assert tree_paths.known_nodes(*tree, [1]) == ([0, 1], [False, False])
        assert tree_paths.known_nodes(*tree, []) == ([], [])

    def test_estimates_follow_what_is_accepted(self):
        text = [7, 1, 2, 8, 1, 2, 9, 1, 2]
        learnt = MatchAcceptance()
        before = self.tree(text, acceptance=learnt)
        for _ in range(200):
            known, accepted = tree_paths.known_nodes(before.tokens, before.parents, [8, 1, 2])
            learnt.learn_nodes(False, before.nodes(known), np.array(accepted))
        after = self.tree(text, acceptance=learnt)
        assert sum(after.values) > sum(before.values)


def test_the_walk_is_the_law_of_the_core():
    """Packed rows on the host give the paths of ``core.trees.accept_drawn_path``."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        lengths, width, vocab = (6, 0, 3, 9), 9, 3
        tokens = torch.randint(0, vocab, (4, width), generator=generator)
        parents = torch.stack(
            [torch.randint(-1, max(node, 0), (4,), generator=generator) for node in range(width)],
            dim=1,
        )
        drawn = torch.randint(0, vocab, (4, width + 1), generator=generator)
        plan = Plan(tokens, lengths, None, parents=parents)
        packed = [
            token for row, n in zip(drawn, lengths, strict=True) for token in row[: n + 1].tolist()
        ]
        nodes, following = tree_paths.accepted_nodes(plan, packed)
        law = accept_drawn_path(tokens, parents, torch.tensor(lengths), drawn)
        assert [len(own) for own in nodes] == law.num_accepted.tolist(), seed
        assert following == law.next_tokens.tolist(), seed
        for own, expected in zip(nodes, law.nodes.tolist(), strict=True):
            assert own == expected[: len(own)], seed


def test_what_cannot_be_combined_with_trees_is_refused(models):
    folder = models.folder(RECIPE)

    def load(draft="suffix", **settings):
        settings = {"policy": "fixed", "tree_width": 2, **settings}
        return LLM(folder, unguarded(draft, **settings), dtype="float32")

    for settings, field, words in (
        ({"draft": "ngram"}, "tree_width", "token trees come from 'suffix'"),
        ({"policy": "svip"}, "tree_width", "policy 'svip' verifies chains only"),
        ({"tree_width": 0}, "tree_width", "at least 1 and at most 8"),
        ({"tree_width": 9}, "tree_width", "at least 1 and at most 8"),
        ({"num_speculative_tokens": 64}, "num_speculative_tokens", "at most 63"),
    ):
        caught = error_of(load, **settings, error=InvalidParameterError, match=words)
        assert caught.field == field
    llm = load()
    with pytest.raises(InvalidParameterError, match="verifies chains only"):
        llm.generate([[1, 2]], speculation=RequestSpeculation(policy="svip"))


def test_lenient_requests_get_chains(models):
    """Trees know no lenience, so a batch with lenience below 1 is drafted as chains."""
    engine = branching(models, RECIPE, "fixed", 4)
    engine.change_speculation(lenience=0.5)
    seen = recorded(engine)
    outputs = generate(engine, [BRANCHING] * 8, [SamplingParams(max_tokens=6)] * 8)
    assert sum(output.speculation.num_accepted for output in outputs) > 0
    assert not any(isinstance(draft, TreeDraft) for draft in seen)


def test_a_target_in_bfloat16_verifies_trees(models):
    llm = LLM(
        models.folder(RECIPE), unguarded("suffix", policy="fixed", tree_width=3), dtype="bfloat16"
    )
    params = SamplingParams(max_tokens=10, temperature=0)
    outputs = llm.generate([BRANCHING] * 4, params)
    alone = LLM(models.folder(RECIPE), dtype="bfloat16")
    assert token_ids(outputs) == token_ids(alone.generate([BRANCHING] * 4, params))
