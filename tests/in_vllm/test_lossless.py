"""At temperature 1 tokens come from the target's distribution; a biased rule is detected."""

import pytest
import torch

from draftwise import SamplingParams

from ..core.statistics_tools import chi_square_p_value, sequence_counts
from ..engine.exact import exact_distribution
from ..tiny_models import ModelShelf, Recipe
from .conftest import answer, steered, steered_texts

pytestmark = pytest.mark.slow

VOCAB, NUM_TOKENS, NUM_REQUESTS = 8, 3, 6000
NOT_UNLIKELY, IMPOSSIBLE = 1e-4, 1e-6
PROMPT = [1, 2, 3]
# vLLM's attention on a CPU needs a head size of at least 32.
TARGET = Recipe(
    vocab=VOCAB,
    config={
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    return ModelShelf(tmp_path_factory.mktemp("models"))


# Each token occurs several times, with different continuations.
REPETITIVE = [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 4, 3, 5, 7, 6, 0, 1, 3, 2, 4, 5, 6, 7]


def small_engine(shelf):
    """The arguments of an engine with the tiny target."""
    return {
        "model": shelf.folder(TARGET),
        "dtype": "float32",
        "max_model_len": 32,
        "max_num_seqs": 64,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 1 << 28,
    }


def sampled(
    shelf, settings, draft, companion, num_requests, num_tokens, samples=True, **extra_arguments
):
    """The output of an engine at temperature 1."""
    method = {"draft_sample_method": "probabilistic"} if samples else {}
    settings = {"companion": shelf.folder(companion), **settings}
    return answer(
        steered(small_engine(shelf), shelf.folder(draft), settings, 2, **method),
        [PROMPT] * num_requests,
        {"temperature": 1.0, "max_tokens": num_tokens},
        **extra_arguments,
    )


def p_value(shelf, settings, rule=None, samples=True, **extra_arguments):
    """The p-value of the tokens under the target's distribution, and the engine's output."""
    if rule is not None:
        extra_arguments["rule"] = rule
    draft, companion = TARGET.draft(0.3), TARGET.draft(0.3, noise_seed=5)
    answers = sampled(
        shelf, settings, draft, companion, NUM_REQUESTS, NUM_TOKENS, samples, **extra_arguments
    )
    tree = exact_distribution(shelf.reference(TARGET), PROMPT, SamplingParams(), NUM_TOKENS)
    counts = sequence_counts(torch.tensor(answers.tokens), VOCAB)
    return chi_square_p_value(counts, tree.joint()), answers


@pytest.mark.exhaustive
def test_a_rule_that_ignores_dropped_tokens_is_lossless(shelf):
    p, answers = p_value(shelf, {"policy": "sv-predictable"}, rule="by-overlap")
    assert answers.sent < answers.drafted
    assert p > NOT_UNLIKELY


@pytest.mark.exhaustive
def test_a_rule_that_looks_at_dropped_tokens_is_biased(shelf):
    """The test detects the bias of the published rule."""
    p, answers = p_value(shelf, {"policy": "sv-predictable"}, rule="by-agreement")
    assert answers.sent < answers.drafted
    assert p < IMPOSSIBLE


def test_the_default_policy_is_lossless_with_sampled_drafts(shelf):
    p, answers = p_value(shelf, {}, costs=0.05)
    assert 0 < answers.sent < answers.drafted
    assert p > NOT_UNLIKELY


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", [None, "by-agreement"])
def test_every_rule_is_lossless_with_greedy_drafts(shelf, rule):
    p, answers = p_value(shelf, {"policy": "sv"}, rule, samples=False, costs=0.1)
    assert answers.sent < answers.drafted
    assert p > NOT_UNLIKELY


def p_value_of_texts(shelf, settings, num_requests=NUM_REQUESTS, runner=1, **extra_arguments):
    """The p-value with drafts from the text, and the engine's output."""
    answers = answer(
        steered_texts(small_engine(shelf), settings, 3),
        [REPETITIVE] * num_requests,
        {"temperature": 1.0, "max_tokens": NUM_TOKENS},
        runner=runner,
        **extra_arguments,
    )
    return p_value_of(shelf, answers), answers


def p_value_of(shelf, answers):
    """The p-value of answers to the repetitive prompt."""
    tree = exact_distribution(shelf.reference(TARGET), REPETITIVE, SamplingParams(), NUM_TOKENS)
    counts = sequence_counts(torch.tensor(answers.tokens), VOCAB)
    return chi_square_p_value(counts, tree.joint())


@pytest.mark.parametrize(
    "settings",
    [
        {"draft": "suffix"},
        pytest.param({"draft": "ngram", "policy": "fixed"}, marks=pytest.mark.exhaustive),
        pytest.param({"policy": "svip"}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_drafts_from_the_text_are_lossless(shelf, settings):
    """Tokens cost nothing, so that many are sent."""
    p, answers = p_value_of_texts(shelf, settings, costs=0.0)
    assert 0.02 * NUM_REQUESTS < answers.accepted < answers.sent
    assert p > NOT_UNLIKELY


def test_drafts_from_the_text_beside_a_model_are_lossless(shelf):
    """The choice between both is made before anything is drawn."""
    draft = shelf.folder(TARGET.draft(0.3))
    answers = answer(
        steered(small_engine(shelf), draft, {"draft": "suffix"}, 3),
        [REPETITIVE] * NUM_REQUESTS,
        {"temperature": 1.0, "max_tokens": NUM_TOKENS},
        rule="both-sources",
    )
    assert 0.2 * answers.sent < answers.copied < 0.8 * answers.sent
    assert 0.02 * NUM_REQUESTS < answers.accepted < answers.sent
    assert p_value_of(shelf, answers) > NOT_UNLIKELY


@pytest.mark.exhaustive
def test_a_selection_by_measured_prices_is_lossless(shelf):
    """The policy drops tokens by their estimated acceptance and by the times of real steps."""
    p, answers = p_value_of_texts(shelf, {"draft": "suffix"})
    assert 0 < answers.accepted < answers.sent
    assert p > NOT_UNLIKELY
