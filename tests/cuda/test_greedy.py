"""At temperature 0 every device says what ``transformers`` generates, however steps are run."""

import functools

import pytest
import torch

from draftwise import SamplingParams
from draftwise.engine.drafting.recorded import RecordedBackend

from ..engine.assembly import generate
from ..stand_ins import SOURCES_WITH_A_MODEL, unguarded
from ..tiny_models import Recipe
from .placing import LENGTHS, PLACES, RECORDED, assemble, load

pytestmark = pytest.mark.slow

VOCAB, NUM_TOKENS = 64, 20
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)


def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def wanted(models):
    """The output of ``generate`` for each prompt, computed once per model."""

    @functools.cache
    def of(family):
        model = models.reference(Recipe(family, VOCAB))
        texts = []
        for each in prompts():
            ids = torch.tensor([each], device=model.device)
            said = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
            )
            texts.append(said[0, len(each) :].tolist())
        return texts

    return of


# Written out here, and through the modules of ``transformers``.
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_with_and_without_a_draft(models, wanted, place, family):
    recipe = Recipe(family, VOCAB)
    speculation = unguarded(models.folder(recipe.draft()), policy="fixed")
    for config, batch_size, chunk in ((None, 16, 512), (speculation, 16, 9), (speculation, 5, 512)):
        llm = load(
            place, models.folder(recipe), config, max_batch_size=batch_size, max_chunk_tokens=chunk
        )
        outputs = llm.generate(prompts(), GREEDY)
        assert [output.token_ids for output in outputs] == wanted(family)
    assert {s for output in outputs for s in output.token_sources} == SOURCES_WITH_A_MODEL


@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_one_at_a_time(models, wanted, place):
    recipe = Recipe("llama", VOCAB)
    speculation = unguarded(models.folder(recipe.draft()), policy="fixed")
    llm = load(place, models.folder(recipe), speculation, max_batch_size=1)
    for each, text in list(zip(prompts(), wanted("llama"), strict=True))[:8]:
        (output,) = llm.generate(each, GREEDY)
        assert output.token_ids == text


# A policy of each kind of draft position and of each kind of selection. The engine's own tests run
# every policy.
@pytest.mark.parametrize("policy", ["svip", "disco", "adaptive", "tetris", "staged", "sv"])
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_policies(models, wanted, place, policy):
    recipe = Recipe("llama", VOCAB)
    engine = assemble(place, models, recipe, 16, policy=policy, num_speculative_tokens=10)
    outputs = generate(engine, prompts(), [GREEDY] * len(LENGTHS))
    assert [output.token_ids for output in outputs] == wanted("llama")


@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_the_bundled_family(place):
    from transformers import AutoModelForCausalLM

    from draftwise import zoo

    model = AutoModelForCausalLM.from_pretrained(zoo.resolve("zoo:target"), dtype=torch.float32)
    model.eval().to(place.device)
    speculation = unguarded("zoo:draft", policy="fixed", num_speculative_tokens=4)
    llm = load(place, "zoo:target", speculation, max_model_len=256, max_batch_size=4)
    texts = ["Tom has 3 apples and", "def add(a, b):", "The capital of France is", "Once upon"]
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    outputs = llm.generate(texts, params)
    for text, output in zip(texts, outputs, strict=True):
        ids = torch.tensor([llm.tokenize(text)], device=place.device)
        said = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
        )
        # ``min_new_tokens`` forbids the end, which the engine may say.
        end = llm.target.tokenizer.eos_token_id
        length = output.token_ids.index(end) if end in output.token_ids else 24
        assert output.token_ids[:length] == said[0, ids.shape[1] :].tolist()[:length]


@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_nothing_is_recorded_twice(models, place):
    """The same requests meet no new size again, and no recording is made anew."""
    recipe = Recipe("llama", VOCAB)
    engine = assemble(place, models, recipe, 16, policy="fixed", num_speculative_tokens=4)
    cached_model = engine._pipeline.proposer.cached_model
    (recorded,) = (
        each for each in engine._pipeline.proposer._backends if isinstance(each, RecordedBackend)
    )
    known = []
    for _ in range(4):
        generate(engine, prompts(), [GREEDY] * len(LENGTHS))
        steps = [cached_model.cache.steps, engine._verifier._cache.steps]
        known.append(
            (
                [id(each) for each in steps],
                [each.num_sizes for each in steps],
                sorted(map(id, recorded._recordings.values())),
            )
        )
    # The second time, prompts are found in the prefix cache, and steps have other sizes.
    assert known[1] == known[2] == known[3]
    assert all(0 < number < 20 for number in known[3][1])
