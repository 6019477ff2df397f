"""Passes over token trees: each node has the logits that it would have in a chain of its path."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwise.kernels.native import library
from draftwise.models.kv_cache import KeptPath
from draftwise.models.loading import load_model
from draftwise.models.segment import Segment
from draftwise.models.tree_tokens import (
    MAX_TREE_TOKENS,
    SegmentTree,
    hidden_in_tree,
    tree_tokens,
    whole_tree,
)

from ..architectures import ALL, CONTEXT, WITH_WINDOWS
from ..tiny_models import Recipe

VOCAB = 16
CLOSE = 2e-4


def random_parents(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(-1, max(node, 0), (), generator=generator)) for node in range(count)]


def random_tokens(count, seed):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def path_to(parents, node):
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def packed(models, recipe, max_model_len=None):
    folder = models.folder(recipe)
    loaded = load_model(folder, "target", torch.float32, torch.device("cpu"), max_model_len)
    return loaded.model


def expected_logits(model, text, parents, tokens):
    """``[nodes + 1, vocab]`` by passes over each path on its own."""
    rows = []
    for node in range(-1, len(parents)):
        ids = [*text, *(tokens[each] for each in path_to(parents, node))]
        cache = model.new_cache(1, CONTEXT)
        rows.append(model.forward(cache, ids, [Segment(0, 0, len(ids))], [len(ids) - 1])[0])
    return torch.stack(rows)


def read(model, cache, text, size):
    """Read a text in passes of a few tokens, which fit a ring."""
    for start in range(0, len(text), size):
        part = text[start : start + size]
        model.forward(cache, part, [Segment(1, start, len(part))], None)


@pytest.fixture(params=["compiled", "PyTorch"])
def kernels(request, monkeypatch):
    """Once with the native kernels, and once without."""
    if request.param == "PyTorch":
        for name in ("packing.native_attention", "forward.native_decoder"):
            monkeypatch.setattr(f"draftwise.models.{name}", lambda *arguments: None)
    elif library.native_library() is None:
        pytest.skip("no compiler")


@pytest.mark.covering("family", "kernels")
@pytest.mark.parametrize("family", ALL)
def test_each_node_reads_its_own_path(models, kernels, family):
    """In layers with a window, the tree begins before and after the window is full."""
    model = packed(models, ALL[family])
    for length in (1, 7, 50):
        parents, text = random_parents(12, length), random_tokens(length, 1)
        tokens = random_tokens(len(parents), 2)
        cache = model.new_cache(3, CONTEXT, 32)
        read(model, cache, text[:-1], 32)
        start = length - 1
        out = model.forward(
            cache,
            [text[-1], *tokens],
            [Segment(1, start, len(tokens) + 1)],
            range(len(tokens) + 1),
            trees=[whole_tree(start, parents)],
        )
        expected = expected_logits(model, text, parents, tokens)
        torch.testing.assert_close(out, expected, atol=CLOSE, rtol=CLOSE)


@pytest.mark.covering("family", "kernels")
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_trees_and_chains_share_a_pass(models, kernels, family):
    """Requests with a chain, a large chunk of a prompt and trees of several sizes."""
    model = packed(models, ALL[family])
    texts = [random_tokens(20 + slot, slot) for slot in range(4)]
    cache = model.new_cache(4, CONTEXT, 64)
    tokens, segments, trees, rows, expected = [], [], [], [], []
    for slot, (text, nodes) in enumerate(zip(texts, (0, 40, 5, 3), strict=True)):
        if slot == 2:  # a chunk of its prompt
            new, start, tree = text, 0, None
        else:
            model.forward(cache, text[:-1], [Segment(slot, 0, len(text) - 1)], None)
            parents = random_parents(nodes, slot) if slot != 3 else list(range(-1, nodes - 1))
            drafted, start = random_tokens(nodes, slot + 9), len(text) - 1
            new = [text[-1], *drafted]
            tree = whole_tree(start, parents) if slot == 1 else None
            expected.append(expected_logits(model, text, parents, drafted))
            rows += range(len(tokens), len(tokens) + len(new))
        tokens += new
        segments.append(Segment(slot, start, len(new)))
        trees.append(tree)
    out = model.forward(cache, tokens, segments, rows, trees=trees)
    torch.testing.assert_close(out, torch.cat(expected), atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_tree_grows_over_several_passes(models, kernels, family):
    """Later tokens of a tree attend to nodes that are in the cache already."""
    model = packed(models, ALL[family])
    text, parents = random_tokens(30, 3), [-1, -1, 0, 0, 1, 2, 4]
    tokens, start = random_tokens(len(parents), 4), 29
    whole = whole_tree(start, parents)
    cache = model.new_cache(1, CONTEXT, 64)
    model.forward(cache, text[:-1], [Segment(0, 0, start)], None)
    out = []
    for first, end in ((0, 1), (1, 3), (3, 6), (6, 8)):
        part = SegmentTree(start, whole.depths[first:end], whole.ancestors[first:end])
        new = [text[-1], *tokens][first:end]
        segment = Segment(0, start + first, end - first)
        out.append(model.forward(cache, new, [segment], range(end - first), trees=[part]))
    expected = expected_logits(model, text, parents, tokens)
    torch.testing.assert_close(torch.cat(out), expected, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("family", ["llama", *WITH_WINDOWS])
def test_a_kept_path_is_like_a_chain(models, family):
    """After a path is kept, the next tokens read it as if the other nodes had never been there."""
    model = packed(models, ALL[family])
    cache = model.new_cache(2, CONTEXT, 16)
    text = random_tokens(9, 5)
    read(model, cache, text[:-1], 16)
    for turn in range(12):
        parents = random_parents(10, turn)
        tokens, start = random_tokens(len(parents), 20 + turn), len(text) - 1
        model.forward(
            cache,
            [text[-1], *tokens],
            [Segment(1, start, len(tokens) + 1)],
            [0],
            trees=[whole_tree(start, parents)],
        )
        path = path_to(parents, (3 * turn + 5) % len(parents)) if turn % 4 else []
        cache.keep_paths([KeptPath(1, start, [node + 1 for node in path])])
        text += [tokens[node] for node in path] + [turn % VOCAB]
        assert cache.lengths[1] == len(text) - 1
        out = model.forward(cache, text[-1:], [Segment(1, len(text) - 1, 1)], [0])
        cache.truncate(1, len(text) - 1)
        expected = expected_logits(model, text, [], [])
        torch.testing.assert_close(out, expected, atol=CLOSE, rtol=CLOSE)


def test_bfloat16_nodes_read_their_own_paths(models):
    loaded = load_model(
        models.folder(Recipe(vocab=VOCAB, context=CONTEXT, config={"head_dim": 32})),
        "target",
        torch.bfloat16,
        torch.device("cpu"),
        None,
    )
    parents, text = random_parents(20, 1), random_tokens(40, 1)
    tokens = random_tokens(20, 2)
    cache = loaded.model.new_cache(1, CONTEXT)
    loaded.model.forward(cache, text[:-1], [Segment(0, 0, 39)], None)
    segment = Segment(0, 39, 21)
    out = loaded.model.forward(
        cache, [text[-1], *tokens], [segment], range(21), trees=[whole_tree(39, parents)]
    )
    expected = expected_logits(loaded.model, text, parents, tokens)
    torch.testing.assert_close(out.float(), expected.float(), atol=0.1, rtol=0.1)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_a_token_attends_to_its_ancestors_alone(data):
    count = data.draw(st.integers(0, MAX_TREE_TOKENS - 1))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
    start = data.draw(st.integers(0, 100))
    first_key = data.draw(st.integers(0, start))
    tree = whole_tree(start, parents)
    found = tree_tokens([Segment(0, start, count + 1)], [tree])
    hidden = hidden_in_tree(found, start, first_key, torch.device("cpu"))
    for node in range(-1, count):
        path = {start, *(start + 1 + each for each in path_to(parents, node))}
        attends = {first_key + int(at) for at in (~hidden[node + 1]).nonzero()}
        assert attends == set(range(first_key, start)) | path
        assert found["position"][node + 1] == start + len(path) - 1


def test_impossible_trees_are_refused():
    with pytest.raises(ValueError, match="at most 64 tokens"):
        whole_tree(0, [-1] * MAX_TREE_TOKENS)
    with pytest.raises(ValueError, match=r"parents\[1\] must be between -1 and 0"):
        whole_tree(0, [-1, 1])
    with pytest.raises(ValueError, match="tree of 2 tokens for a segment of 3"):
        tree_tokens([Segment(0, 5, 3)], [whole_tree(5, [-1])])
    with pytest.raises(ValueError, match="tree from 6 on"):
        tree_tokens([Segment(0, 5, 2)], [whole_tree(6, [-1])])
