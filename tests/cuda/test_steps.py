"""Recorded steps and drafting in a row give what the plain way gives."""

import math

import pytest
import torch

from draftwise import SamplingParams
from draftwise.engine.drafting.recorded import RecordedBackend
from draftwise.errors import NumericalError
from draftwise.models.loading import load_model
from draftwise.models.memory import fetch, upload
from draftwise.models.segment import Segment
from draftwise.models.static_steps import LARGEST_STEP, StepMode, step_size

from ..engine.assembly import generate, token_ids
from ..tiny_models import Recipe
from .placing import NEEDS_CUDA, PLACES, RECORDED, assemble, varied_outputs

pytestmark = pytest.mark.slow

VOCAB = 32
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
CUDA = torch.device("cuda")


def test_sizes():
    sizes = {step_size(count) for count in range(1, LARGEST_STEP + 1)}
    assert all(count <= step_size(count) <= 1.5 * count + 3 for count in range(1, LARGEST_STEP + 1))
    assert max(sizes) == LARGEST_STEP
    assert len(sizes) < 30


@pytest.mark.parametrize("device", DEVICES)
def test_up_and_down(device):
    numbers = [3, 1, 2]
    tensor = upload(numbers, torch.long, torch.device(device))
    assert tensor.device.type == device
    whole, parts, flags = fetch(tensor, torch.tensor([[0.5], [0.25]]).to(device), tensor > 1)
    assert (whole.tolist(), whole.dtype) == (numbers, torch.long)
    assert (parts.tolist(), parts.dtype) == ([[0.5], [0.25]], torch.float32)
    assert flags.tolist() == [True, False, True]
    assert upload([], torch.long, torch.device(device)).shape == (0,)


@torch.inference_mode()
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_logits_of_all_sorts_of_steps(models, place):
    """Rows with holes, one token and several, lengths that go back: as a fresh forward."""
    recipe = Recipe(vocab=VOCAB)
    device = torch.device(place.device)
    model = load_model(models.folder(recipe), "target", torch.float32, device).model
    model.step_mode = place.mode
    reference = models.reference(recipe)
    cache = model.new_cache(6, 48)
    texts = [[] for _ in range(6)]
    generator = torch.Generator().manual_seed(1)
    for step in range(40):
        rows = sorted(torch.randperm(6, generator=generator)[: 1 + step % 4].tolist())
        new = {
            row: torch.randint(0, VOCAB, (1 + (step * row) % 4,), generator=generator).tolist()
            for row in rows
        }
        for row in rows:
            if len(texts[row]) > 30:
                del texts[row][5:]
                cache.truncate(row, 5)
        segments = [Segment(row, len(texts[row]), len(new[row])) for row in rows]
        tokens = [token for row in rows for token in new[row]]
        logits = model.forward(cache, tokens, segments, range(len(tokens)))
        first = 0
        for row in rows:
            texts[row] += new[row]
            count = len(new[row])
            expected = reference(input_ids=torch.tensor([texts[row]])).logits[0, -count:]
            actual = logits[first : first + count].cpu()
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
            first += count


SAMPLED = SamplingParams(max_tokens=12, temperature=1.1)


@pytest.mark.parametrize("policy", ["fixed", "svip", "disco", "tetris"])
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_drafting_in_a_row_says_what_drafting_one_by_one_says(models, monkeypatch, place, policy):
    recipe = Recipe(vocab=VOCAB, seed=3)

    def run():
        engine = assemble(place, models, recipe, 7, policy=policy, num_speculative_tokens=11)
        return token_ids(varied_outputs(engine))

    in_a_row = run()
    monkeypatch.setattr(RecordedBackend, "serves", lambda *_: False)
    one_by_one = run()
    assert sum(a != b for a, b in zip(in_a_row, one_by_one, strict=True)) <= 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_a_draft_that_is_not_a_number_proposes_nothing(models, place, temperature):
    recipe = Recipe(vocab=VOCAB, seed=8)
    engine = assemble(place, models, recipe, 5, policy="fixed", num_speculative_tokens=3)
    params = [SamplingParams(max_tokens=8, temperature=temperature, seed=1)] * 6
    prompts = [[1, 2, index] for index in range(6)]
    with torch.no_grad():
        cached_model = engine._pipeline.proposer.cached_model
        cached_model.model._model.get_input_embeddings().weight[5] = math.nan
    outputs = generate(engine, prompts, params)
    assert all(output.error is None and len(output.token_ids) == 8 for output in outputs)


@pytest.mark.parametrize("place", RECORDED, ids=str)
def test_a_target_that_is_not_a_number_fails_one_request(models, place):
    recipe = Recipe(vocab=VOCAB, seed=8)
    params = [SamplingParams(max_tokens=8, temperature=0, logit_bias={17: -100.0})] * 5
    prompts = [[1, 2, index] for index in range(5)]

    def run(broken):
        engine = assemble(place, models, recipe, 3, policy="fixed", num_speculative_tokens=3)
        if broken:
            with torch.no_grad():
                model = engine._verifier._model._model
                model.get_input_embeddings().weight[17] = math.nan
            return generate(engine, [*prompts, [1, 17, 2]], [*params, params[0]])
        return generate(engine, prompts, params)

    *others, failed = run(True)
    assert isinstance(failed.error, NumericalError)
    assert [o.token_ids for o in others] == [o.token_ids for o in run(False)]


@NEEDS_CUDA
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@torch.inference_mode()
def test_the_host_is_not_waited_for_while_steps_are_queued(models):
    """Recorded steps of a target and of a draft, once their memory is there."""
    recipe = Recipe(vocab=VOCAB, seed=3)
    model = load_model(models.folder(recipe), "target", torch.float32, CUDA).model
    assert model.step_mode is StepMode.GRAPHS
    cache = model.new_cache(4, 48)
    segments = [Segment(0, 5, 1), Segment(2, 0, 1)]
    for _ in range(3):
        model.forward(cache, [1, 2], segments, range(2))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.forward(cache, [1, 2], segments, range(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
