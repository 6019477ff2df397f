"""Greedy and lossless tests on vLLM's V2 model runner, with interpreted Triton kernels.

They are smaller than those on V1, because the interpreter is slow.
"""

import pytest
import torch

from draftwise import SamplingParams

from ..core.statistics_tools import chi_square_p_value
from ..engine.exact import exact_distribution
from .conftest import answer, steered, steered_texts
from .test_greedy import engine, long_and_short_prompts
from .test_lossless import (
    IMPOSSIBLE,
    NOT_UNLIKELY,
    PROMPT,
    TARGET,
    p_value_of_texts,
    sampled,
    shelf,
)

pytestmark = pytest.mark.slow

__all__ = ["engine", "shelf"]

GREEDY = {"temperature": 0.0, "max_tokens": 20}
NUM_PROMPTS, NUM_REQUESTS, NUM_TOKENS = 12, 600, 3


@pytest.fixture(scope="module")
def prompts(zoo):
    return long_and_short_prompts(zoo, NUM_PROMPTS)


@pytest.fixture(scope="module")
def expected(engine, prompts):
    """Tokens of the target alone, by the V1 model runner."""
    return answer(engine, prompts, GREEDY).tokens


def test_texts_with_svip_equal_the_targets(engine, zoo, prompts, expected):
    settings = {"policy": "svip", "policy_options": {"threshold": 0.8}}
    answers = answer(steered(engine, zoo["draft"], settings), prompts, GREEDY, runner=2)
    assert answers.tokens == expected
    assert 0 < answers.sent == answers.drafted


def test_texts_with_copies_beside_a_model_equal_the_targets(engine, zoo, prompts, expected):
    arguments = steered(engine, zoo["draft"], {"draft": "suffix"})
    answers = answer(arguments, prompts, GREEDY, runner=2, rule="both-sources")
    assert answers.tokens == expected
    assert 0 < answers.copied < answers.sent
    assert not answers.wrong_texts


@pytest.mark.exhaustive
def test_texts_with_the_draft_as_companion_equal_the_targets(engine, zoo, prompts, expected):
    settings = {"policy": "sv", "companion": zoo["draft"]}
    arguments = steered(engine, zoo["draft"], settings)
    answers = answer(arguments, prompts, GREEDY, runner=2, costs=0.05)
    assert answers.tokens == expected
    assert answers.asked > 5
    assert answers.smallest_overlap > 1 - 1e-3


@pytest.mark.exhaustive
def test_texts_with_chunks_prefixes_and_dropped_tokens_equal_the_targets(
    engine, zoo, prompts, expected
):
    small = {
        **engine,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 5,
        "enable_prefix_caching": True,
    }
    settings = {"policy": "sv", "companion": zoo["companion"]}
    answers = answer(steered(small, zoo["draft"], settings), prompts, GREEDY, runner=2, costs=0.2)
    assert answers.tokens == expected
    assert answers.asked > 5
    assert answers.smallest_overlap < 0.9
    assert 0 < answers.sent < answers.drafted


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft", ["suffix", "ngram"])
def test_texts_without_a_draft_model_equal_the_targets(engine, prompts, expected, draft):
    """Each prompt occurs twice, so that some texts come from the prefix cache."""
    small = {
        **engine,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 5,
        "enable_prefix_caching": True,
    }
    arguments = steered_texts(small, {"draft": draft}, 8)
    answers = answer(arguments, prompts + prompts, GREEDY, runner=2, costs=0.0)
    assert answers.tokens == expected + expected
    assert answers.accepted > 0
    assert not answers.wrong_texts


@pytest.mark.exhaustive
def test_drafts_from_the_text_are_lossless(shelf):
    p, answers = p_value_of_texts(shelf, {"draft": "suffix"}, NUM_REQUESTS, runner=2, costs=0.0)
    assert 0 < answers.accepted < answers.sent
    assert p > NOT_UNLIKELY


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", ["by-overlap", "by-agreement"])
def test_only_the_rule_that_looks_at_dropped_tokens_is_biased(shelf, rule):
    """A rule that ignores dropped tokens is lossless. The bias of the other rule is detected.

    To detect it with few requests, the test counts the tokens that the biased rule makes more
    likely. This rule verifies a token if the companion would also draw it. If it drops a token,
    vLLM draws from p.
    """
    draft, companion = TARGET.draft(0.1), TARGET.draft(0.6, noise_seed=5)
    answers = sampled(shelf, {}, draft, companion, NUM_REQUESTS, NUM_TOKENS, rule=rule, runner=2)
    assert answers.sent < answers.drafted
    first, p = distributions(shelf, TARGET)
    _, q = distributions(shelf, draft)
    _, c = distributions(shelf, companion)
    sends = q * (c >= 0.9 * q)
    left = (p - q).clamp(min=0)
    rejected = (sends * (1 - p / q).clamp(min=0)).sum(dim=1, keepdim=True)
    biased = (
        torch.minimum(sends, p * (sends > 0))
        + rejected * left / left.sum(dim=1, keepdim=True)
        + (q - sends).sum(dim=1, keepdim=True) * p
    )
    favoured = biased > p
    share = float((first[:, None] * p * favoured).sum())
    tokens = torch.tensor(answers.tokens)
    count = int(favoured[tokens[:, 0], tokens[:, 1]].sum())
    likely = chi_square_p_value(
        torch.tensor([count, NUM_REQUESTS - count]), torch.tensor([share, 1 - share])
    )
    if rule == "by-overlap":
        assert likely > NOT_UNLIKELY
    else:
        assert likely < IMPOSSIBLE


def distributions(shelf, recipe):
    """``[vocab]`` of the first token, and ``[vocab, vocab]`` of the second given the first."""
    tree = exact_distribution(shelf.reference(recipe), PROMPT, SamplingParams(), 2)
    first, second = tree.conditionals
    return first[0], second
