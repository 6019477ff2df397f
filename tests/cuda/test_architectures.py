"""All described models say what ``transformers`` generates, in recorded steps, past windows."""

import pytest

from draftwise import SamplingParams
from draftwise.engine.drafting.recorded import RecordedBackend
from draftwise.models.decoder_families import DESCRIBED_ARCHITECTURES, HYBRID_ARCHITECTURES
from draftwise.models.static_steps import StepMode

from ..architectures import CONTEXT, DESCRIBED, NUM_TOKENS, PROMPTS, WITH_WINDOWS, continuation
from ..models.test_native_experts import ARCHITECTURES as WITH_EXPERTS
from ..stand_ins import unguarded
from .placing import PLACES, load

pytestmark = pytest.mark.slow


def test_every_described_architecture_is_tested(models):
    """Those with experts or recurrences are tested with the native kernels, which compute them."""
    tested = {type(models.reference(each)).__name__ for each in DESCRIBED.values()}
    with_experts = {f"{each}ForCausalLM" for each in WITH_EXPERTS}
    assert tested == DESCRIBED_ARCHITECTURES - with_experts - HYBRID_ARCHITECTURES


@pytest.mark.covering("place", "family", "policy", "batch_size")
@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("policy", ["none", "fixed"])
@pytest.mark.parametrize("family", DESCRIBED)
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_greedy_texts_past_the_window(models, place, family, policy, batch_size):
    """Prompts are read in chunks, so that rings overwrite old tokens in steps of any size."""
    recipe = DESCRIBED[family]
    speculation = unguarded(models.folder(recipe.draft()), policy=policy, num_speculative_tokens=3)
    llm = load(
        place,
        models.folder(recipe),
        speculation,
        max_batch_size=batch_size,
        max_chunk_tokens=16,
        enable_prefix_caching=False,
    )
    indices = range(len(PROMPTS)) if batch_size > 1 else [3, 12]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    outputs = llm.generate([PROMPTS[index] for index in indices], params)
    for index, output in zip(indices, outputs, strict=True):
        assert output.token_ids == continuation(models, family, index)
    cache = llm.engine._verifier._cache
    assert (min(cache.sizes) < CONTEXT) == (family in WITH_WINDOWS)
    if place.mode is not StepMode.EAGER:
        assert cache.steps.num_sizes > 0
        if policy == "fixed":
            backends = llm.engine._pipeline.proposer._backends
            (recorded,) = (each for each in backends if isinstance(each, RecordedBackend))
            assert recorded._recordings
