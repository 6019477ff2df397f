"""The exact distribution of the first tokens, from log-probabilities of a few likely tokens."""

import itertools
import math
from collections import Counter

import pytest
import torch

from draftwise.audit.answers import Answer, ScoredToken
from draftwise.audit.law import Sampling, law_of, next_tokens
from draftwise.audit.nodes import Node, Nodes, is_in_text
from draftwise.core.sampling import LogitControls, TokenHistory, probabilities

TOKENS = tuple(f" {letter}" for letter in "abcdefghij")
CLOSE = 1e-6
SETTINGS = (
    Sampling("plain"),
    Sampling("cold", temperature=0.7, top_k=4),
    Sampling("nucleus", top_p=0.8),
    Sampling("few", top_k=3),
    Sampling("few and nucleus", top_k=5, top_p=0.7, temperature=0.9),
    Sampling("penalties", presence_penalty=0.6, frequency_penalty=0.5),
    Sampling("bias", bias={" b": -1.5, " d": 1.0}, bias_ids={1: -1.5, 3: 1.0}),
    Sampling("all", 0.8, 6, 0.9, 0.6, 0.5, {" b": -1.5}, {1: -1.5}),
)


def scores(seed):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(len(TOKENS), generator=generator)).log_softmax(0).double()


def reference(log_p, sampling, output):
    """The distribution of the next token as the engine samples it."""
    controls = LogitControls(
        torch.tensor([sampling.temperature]),
        all_greedy=False,
        any_greedy=False,
        top_k=torch.tensor([sampling.top_k or len(TOKENS)]),
        top_p=torch.tensor([sampling.top_p]),
        presence_penalty=torch.tensor([sampling.presence_penalty]),
        frequency_penalty=torch.tensor([sampling.frequency_penalty]),
        bias_tokens=torch.tensor([[*sampling.bias_ids, 0]]),
        bias_values=torch.tensor([[*sampling.bias_ids.values(), 0.0]]),
    )
    counts = Counter(output) or Counter({0: 0})
    history = TokenHistory(torch.tensor([[*counts]]), torch.tensor([[*counts.values()]]).float())
    return probabilities(log_p[None].float(), controls, history)[0]


def node(log_p, num_listed=10):
    order = log_p.argsort(descending=True)[:num_listed].tolist()
    listed = log_p[order].numpy()
    tail = max(0.0, 1 - float(log_p[order].exp().sum()))
    limit = float(listed[-1]) if num_listed < len(TOKENS) else -math.inf
    return Node(tuple(TOKENS[i] for i in order), listed, tail if limit > -math.inf else 0.0, limit)


@pytest.mark.parametrize("sampling", SETTINGS, ids=lambda each: each.name)
def test_the_next_token_has_the_engines_distribution(sampling):
    for seed, output in itertools.product(range(5), ([], [1], [1, 1, 3])):
        log_p = scores(seed)
        found = next_tokens(node(log_p), sampling, Counter(TOKENS[i] for i in output), CLOSE)
        expected = reference(log_p, sampling, output)
        for index, token in enumerate(TOKENS):
            assert found.get(token, 0.0) == pytest.approx(float(expected[index]), abs=1e-5)


@pytest.mark.parametrize("sampling", SETTINGS, ids=lambda each: each.name)
def test_what_is_not_listed_leaves_the_rest_exact_or_unknown(sampling):
    """Probabilities of listed tokens are right, or the node is not used."""
    num_known = 0
    for seed, output in itertools.product(range(12), ([], [1], [2, 2])):
        log_p = scores(seed)
        counts = Counter(TOKENS[i] for i in output)
        found = next_tokens(node(log_p, 7), sampling, counts, CLOSE)
        if found is None:
            continue
        num_known += 1
        expected = reference(log_p, sampling, output)
        for token, p in found.items():
            # The tail may be unknown to a thousandth.
            assert p == pytest.approx(float(expected[TOKENS.index(token)]), rel=2e-3, abs=1e-5)
    assert num_known


def test_a_filter_that_cuts_between_equal_tokens_is_not_used():
    log_p = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64).log().numpy()
    tied = Node((" a", " b", " c"), log_p, 0.0, -math.inf)
    assert next_tokens(tied, Sampling("", top_k=2), Counter(), CLOSE) is None
    assert next_tokens(tied, Sampling("", top_k=1), Counter(), CLOSE) == {" a": 1.0}
    assert next_tokens(tied, Sampling("", top_p=0.7), Counter(), CLOSE) is None


def scored(log_p, token, num_listed):
    best = log_p.argsort(descending=True)[:num_listed].tolist()
    top = {TOKENS[i]: float(log_p[i]) for i in {*best, token}}
    return ScoredToken(TOKENS[token], float(log_p[token]), top)


def answers(num_listed, pairs):
    """Answers of two tokens; the second distribution depends on the first token."""
    for first, second in pairs:
        tokens = (
            scored(scores(0), first, num_listed),
            scored(scores(first + 1), second, num_listed),
        )
        text = TOKENS[first] + TOKENS[second]
        yield Answer(text, "length", tokens)


@pytest.mark.parametrize("num_listed", [len(TOKENS), 6])
def test_the_law_of_two_tokens_is_that_of_enumeration(num_listed):
    nodes = Nodes()
    nodes.add(answers(num_listed, itertools.product(range(10), range(10))))
    law = law_of(nodes, Sampling("plain"), 2)
    assert sum(law.cells.values()) + law.other == pytest.approx(1)
    for text, p in law.cells.items():
        first, second = (TOKENS.index(f" {letter}") for letter in text.split())
        assert p == pytest.approx(float((scores(0)[first] + scores(first + 1)[second]).exp()))
    assert 70 < len(law.cells) <= 100 if num_listed == 10 else 20 < len(law.cells) < 50
    assert law.other == pytest.approx(0, abs=1e-3) if num_listed == 10 else law.other > 0.005


def test_prefixes_that_no_answer_had_are_other_texts():
    nodes = Nodes()
    best = int(scores(0).argmax())
    nodes.add(answers(10, [(best, 0)]))
    law = law_of(nodes, Sampling("plain"), 2)
    p = float(scores(0)[best].exp())
    assert law is None if p < 0.4 else law.other == pytest.approx(1 - p, abs=1e-4)
    assert law_of(Nodes(), Sampling("plain"), 1) is None


def test_tokens_that_are_not_text_are_other_texts():
    assert not any(map(is_in_text, ("", "</s>", "<|im_end|>", "\ufffd", "[EOS]")))
    assert all(map(is_in_text, (" a", "<", "[1]", "< a>", "\n")))
    top = {"a": math.log(0.7), "</s>": math.log(0.3)}
    nodes = Nodes()
    nodes.add([Answer("a", "stop", (ScoredToken("a", top["a"], top),))])
    law = law_of(nodes, Sampling("plain"), 1)
    assert law.cells == {"a": pytest.approx(0.7)}
    assert law.other == pytest.approx(0.3)


def test_texts_without_blanks_are_compared_where_single_tokens_lose_them():
    """Tokenizers of SentencePiece's kind leave out the blank of a token that is decoded alone."""
    nodes = Nodes()
    nodes.add([Answer(" red car", "length", (ScoredToken("red", 0.0, {"red": 0.0}),))])
    assert not nodes.has_words
    nodes = Nodes()
    tokens = (ScoredToken("red", 0.0, {"red": 0.0}), ScoredToken("car", 0.0, {"car": 0.0}))
    nodes.add([Answer("red car", "length", tokens)])
    assert nodes.has_words
    assert law_of(nodes, Sampling("plain"), 2).cells == {"redcar": 1.0}
    assert nodes.key("red car") == "redcar"


def test_rounding_is_the_spread_of_several_visits():
    nodes = Nodes()
    assert nodes.rounding(2) == 0.0
    for shift in (0.01, -0.01):
        log_p = {"a": math.log(0.5) + shift, "b": math.log(0.5) - shift}
        nodes.add([Answer("a", "length", (ScoredToken("a", log_p["a"], log_p),))])
    assert nodes.rounding(1) == pytest.approx(1e-4, rel=1e-3)
    assert nodes[()].log_p[0] == pytest.approx(math.log(0.5), abs=1e-4)
    assert nodes.close > 0.03
