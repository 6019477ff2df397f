"""Heads of EAGLE-1 and EAGLE-2 draft by the published pass, whatever happens to requests."""

from itertools import pairwise

import pytest

from draftwise import LLM
from draftwise.engine.assembly import Models
from draftwise.errors import UnsupportedModelError
from draftwise.models import hidden_states
from draftwise.profiling.passes import PassShape, PassTimer, Stage

from ..stand_ins import unguarded
from ..tiny_models import Recipe
from .assembly import generate, sampled
from .eagle_heads import FLAT, HEAD, SPECULATORS, assert_published
from .heads import GAMMA, TARGET, engine_with_head, head_folder, recorded_drafts
from .target_readers import PROMPTS

HEADS = {
    "safeailab": HEAD,
    "speculators": SPECULATORS,
    "bias-not-mentioned": HEAD.changed(bias=None),
    "target-s-embedding": HEAD.changed(bias=False, own_embedding=False),
    "layernorms": SPECULATORS.changed(bias=True, layernorms=True),
    "qwen2": HEAD.changed(biased_attention=True),
    "own-projection": HEAD.changed(own_projection=True),
    "two-layers": HEAD.changed(
        num_layers=2, settings={"architectures": ["EagleLlamaForCausalLM"], "logit_scale": 0.7}
    ),
}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", HEADS)
def test_drafts_follow_the_published_pass(models, name):
    """In batches, with prompts in chunks, before and after partial acceptances."""
    head = HEADS[name]
    settings = {"num_speculative_tokens": GAMMA, "max_chunk_tokens": 9, "caches_prefixes": False}
    engine = engine_with_head(models, FLAT, head, **settings)
    drafts = recorded_drafts(engine)
    generate(engine, PROMPTS, sampled(len(PROMPTS)))
    lengths = {}
    for drafted in drafts:  # by request: the prompts begin with different tokens
        lengths.setdefault(drafted.text[0], []).append(len(drafted.text))
    gained = {after - before for each in lengths.values() for before, after in pairwise(each)}
    assert 1 in gained
    assert gained & set(range(2, GAMMA + 1))
    assert_published(models, drafts, head, FLAT)


@pytest.mark.parametrize("family", ["gemma2", "granite", "olmo2", "gpt2"])
def test_drafts_with_other_targets(models, family):
    """With scaled and limited logits, other final norms, and Hugging Face's own modules."""
    target = Recipe(family, vocab=12, seed=2)
    if family == "gemma2":
        target = target.draft(0.0, config={"final_logit_softcapping": 3.0})
    engine = engine_with_head(models, target, HEAD, num_speculative_tokens=GAMMA)
    drafts = recorded_drafts(engine)
    generate(engine, PROMPTS, sampled(len(PROMPTS)))
    assert_published(models, drafts, HEAD, target)


def test_passes_of_a_head_are_timed(models):
    """As the policies that know prices need it."""
    llm = LLM(
        models.folder(TARGET), unguarded(head_folder(models, HEAD), policy="fixed"), dtype="float32"
    )
    timer = PassTimer(Models(llm.target, llm.draft), 4, 16, GAMMA)
    assert set(timer.stages) == {Stage.TARGET, Stage.DRAFT}
    assert timer(Stage.DRAFT, PassShape(4, 4, 8)) > 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (TARGET.draft(0.0, vocab=16), "a vocabulary of 12, and the target has 16"),
        (
            TARGET.draft(0.0, config={"num_hidden_layers": 2, "hidden_size": 32}),
            "a hidden size of 16, and the target has 32",
        ),
    ],
)
@pytest.mark.parametrize("head", [HEAD, SPECULATORS], ids=["safeailab", "speculators"])
def test_heads_of_other_targets_are_refused(models, head, target, message):
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        engine_with_head(models, target, head)
    assert caught.value.field == "draft"
    assert "\n" not in caught.value.message


def test_a_head_with_the_configuration_of_its_target_is_named_as_in_vllm(models):
    """It drafts as the same head with a configuration of its own."""
    copied = HEAD.changed(settings={"num_hidden_layers": 2})
    texts, num_accepted = [], []
    for head in (HEAD, copied):
        vllms = {"method": "eagle", "model": head_folder(models, head), "num_speculative_tokens": 3}
        llm = LLM(
            models.folder(FLAT), {**vllms, "policy": "fixed", "guard": False}, dtype="float32"
        )
        outputs = llm.generate(PROMPTS, sampled(len(PROMPTS)))
        texts.append([output.token_ids for output in outputs])
        num_accepted.append([output.speculation.num_accepted for output in outputs])
    assert texts[0] == texts[1]
    assert num_accepted[0] == num_accepted[1]
    assert sum(num_accepted[0]) > 0


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("eagle3", "is a head of EAGLE-1 or EAGLE-2, and the method is 'eagle3'; set 'eagle'"),
        ("eagle", "is no head, for which the method is 'eagle'; leave out the method"),
    ],
)
def test_drafts_of_another_kind_than_the_method_are_refused(models, method, message):
    draft = models.folder(TARGET) if method == "eagle" else head_folder(models, HEAD)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        LLM(models.folder(TARGET), {"method": method, "model": draft}, dtype="float32")
    assert caught.value.field == "draft"


def test_a_target_without_a_known_final_norm_is_refused(models, monkeypatch):
    monkeypatch.setattr(hidden_states, "_FINAL_NORMS", ())
    with pytest.raises(UnsupportedModelError, match="final norm of a llama target is not found"):
        engine_with_head(models, head=HEAD)
