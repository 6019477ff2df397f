"""Drafts that are not a draft model are lossless on every device: copied text, heads, exits, trees.

The target's hidden states that heads and exits read come from recorded steps too.
"""

import pytest

from draftwise import SamplingParams
from draftwise.engine.drafting.recorded import RecordedBackend

from ..engine.assembly import generate, token_ids
from ..engine.exits import AdapterRecipe
from ..engine.heads import head_folder
from ..engine.test_lossless import NOT_UNLIKELY
from ..engine.test_text_proposers import CONTROLS, p_value
from ..tiny_eagle_heads import EagleRecipe
from ..tiny_heads import HeadRecipe
from ..tiny_models import Recipe
from .placing import LENGTHS, RECORDED, assemble_with, load, varied_outputs

pytestmark = pytest.mark.slow

SMALL = Recipe(vocab=8, seed=3, config={"num_hidden_layers": 4})
LARGE = Recipe(vocab=64, seed=3, config={"num_hidden_layers": 4})
GREEDY = SamplingParams(max_tokens=20, temperature=0)


def draft_names(models, kind, recipe):
    """Names of the drafts of a kind."""
    vocab = recipe.vocab
    if kind == "suffix":
        return [kind]
    if kind == "exit":
        return ["target:exit=2"]
    if kind == "adapted exit":
        return [AdapterRecipe().save(models._root / "exit-adapter")]
    if kind == "model":
        return [models.folder(recipe.draft())]
    head = HeadRecipe(
        layers=(0, 1),
        vocab=vocab,
        draft_vocab=vocab * 3 // 4,
        settings={"norm_before_residual": True},
    )
    if kind == "eagle":
        head = EagleRecipe(vocab=vocab, bias=True)
    folder = head_folder(models, head)
    return ["suffix", folder] if kind == "suffix and head" else [folder]


def engine_with(models, place, kind, recipe, policy="fixed", max_batch_size=16, **settings):
    """An engine at a place, with drafts of a kind."""
    return assemble_with(
        place,
        models,
        recipe,
        tuple(draft_names(models, kind, recipe)),
        max_batch_size,
        companion="target:exit=3" if kind == "exit" else None,
        policy=policy,
        **{"num_speculative_tokens": 4, **settings},
    )


CHAINS = ["suffix", "head", "eagle", "exit", "adapted exit", "suffix and head"]
TREES = ["suffix", "model", "head", "eagle"]
# Each kind of draft, with one of three policies. EAGLE-2's rules grow trees of models and heads.
CHAIN_POLICIES = [
    ("suffix", "adaptive"),
    ("head", "svip"),
    ("eagle", "fixed"),
    ("exit", "adaptive"),
    ("adapted exit", "svip"),
    ("suffix and head", "fixed"),
]
TREE_POLICIES = [
    ("suffix", "fixed"),
    ("model", "eagle2"),
    ("head", "svip-tree"),
    ("eagle", "eagle2"),
]


def prompts(vocab):
    return [
        [(7 * i + j * j * (1 + i % 3)) % vocab for j in range(n)] for i, n in enumerate(LENGTHS)
    ]


def assert_greedy_texts_are_the_targets(models, place, engine_of):
    expected = load(place, models.folder(LARGE), max_batch_size=16).generate(prompts(64), GREEDY)
    num_accepted = 0
    for max_batch_size in (1, 16):
        engine = engine_of(max_batch_size)
        outputs = generate(engine, prompts(64), [GREEDY] * len(LENGTHS))
        assert token_ids(outputs) == token_ids(expected)
        num_accepted += sum(output.speculation.num_accepted for output in outputs)
    assert num_accepted


@pytest.mark.parametrize(("kind", "policy"), CHAIN_POLICIES)
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_greedy_texts_are_the_targets(models, place, kind, policy):
    assert_greedy_texts_are_the_targets(
        models, place, lambda size: engine_with(models, place, kind, LARGE, policy, size)
    )


def texts_and_accepted(outputs):
    """The texts, and how many of their tokens were drafted and accepted."""
    return token_ids(outputs), sum(output.speculation.num_accepted for output in outputs)


@pytest.mark.parametrize(
    ("kind", "policy"), [("head", "fixed"), ("eagle", "svip"), ("suffix and head", "svip")]
)
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_heads_draft_in_a_row_what_they_draft_one_by_one(models, monkeypatch, place, kind, policy):
    engine = engine_with(models, place, kind, LARGE, policy, 7, num_speculative_tokens=11)
    served, right = [], RecordedBackend.serves

    def serves(*arguments):
        served.append(right(*arguments))
        return served[-1]

    monkeypatch.setattr(RecordedBackend, "serves", serves)
    in_a_row = texts_and_accepted(varied_outputs(engine))
    assert any(served)
    monkeypatch.setattr(RecordedBackend, "serves", lambda *_: False)
    engine = engine_with(models, place, kind, LARGE, policy, 7, num_speculative_tokens=11)
    one_by_one = texts_and_accepted(varied_outputs(engine))
    assert sum(a != b for a, b in zip(in_a_row[0], one_by_one[0], strict=True)) <= 1
    assert abs(in_a_row[1] - one_by_one[1]) <= 0.05 * one_by_one[1]


@pytest.mark.parametrize("kind", ["head", "exit"])
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_greedy_texts_with_a_companion_are_the_targets(models, place, kind):
    assert_greedy_texts_are_the_targets(
        models, place, lambda size: engine_with(models, place, kind, LARGE, "sv", size)
    )


@pytest.mark.parametrize(("kind", "policy"), TREE_POLICIES)
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_greedy_texts_with_trees_are_the_targets(models, place, kind, policy):
    assert_greedy_texts_are_the_targets(
        models,
        place,
        lambda size: engine_with(
            models, place, kind, LARGE, policy, size, tree_width=3, num_speculative_tokens=12
        ),
    )


@pytest.mark.covering("kind", "controls")
@pytest.mark.parametrize("controls", ["plain", "hot", "penalised"])
@pytest.mark.parametrize("kind", CHAINS)
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_texts_follow_the_target(models, place, kind, controls):
    engine = engine_with(models, place, kind, SMALL, max_batch_size=64)
    found = p_value(models, engine, CONTROLS[controls], 2400, [1, 2, 3, 1, 2], SMALL, 0.01)
    assert found > NOT_UNLIKELY


@pytest.mark.covering("kind", "controls")
@pytest.mark.parametrize("controls", ["plain", "filtered"])
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_texts_with_trees_follow_the_target(models, place, kind, controls):
    settings = {"tree_width": 3, "num_speculative_tokens": 8}
    engine = engine_with(models, place, kind, SMALL, max_batch_size=64, **settings)
    prompt = [1, 2, 3, 1, 2]
    found = p_value(models, engine, CONTROLS[controls], 2400, prompt, SMALL, 0.01, max_tokens=7)
    assert found > NOT_UNLIKELY
