"""A draft that was interrupted leaves nothing in the distributions of later ones."""

import pytest
import torch

from draftwise import SamplingParams
from draftwise.engine.assembly import EngineOptions, Models
from draftwise.engine.drafting.eager import EagerBackend
from draftwise.engine.drafting.native import NativeBackend
from draftwise.engine.engine import Engine
from draftwise.kernels.native.library import kernel_in_use
from draftwise.models.loading import load_model

from ..stand_ins import unguarded
from ..tiny_models import Recipe

RECIPE = Recipe(vocab=16, seed=6)


@pytest.mark.parametrize(
    "backend",
    [
        EagerBackend,
        pytest.param(
            NativeBackend,
            marks=pytest.mark.skipif(
                kernel_in_use() != "native", reason="no native kernels on this machine"
            ),
        ),
    ],
)
def test_columns_beyond_a_draft_are_zero(models, monkeypatch, backend):
    monkeypatch.setattr(NativeBackend, "serves", lambda *_: backend is NativeBackend)
    loaded = {
        role: load_model(models.folder(recipe), role, torch.float32, torch.device("cpu"), None)
        for role, recipe in (("target", RECIPE), ("draft", RECIPE.draft()))
    }
    config = unguarded(models.folder(RECIPE.draft()), policy="fixed", num_speculative_tokens=6)
    engine = Engine(Models(**loaded), config, EngineOptions(3))
    finish, num_checked = backend.finish, 0

    def interrupted(self, lengths, num_tokens):
        raise KeyboardInterrupt

    def checked(self, lengths, num_tokens):
        nonlocal num_checked
        draft = finish(self, lengths, num_tokens)
        for row, length in enumerate(draft.lengths):
            # The bonus token is drawn from p alone: q is 0 there.
            assert not draft.probs[row, length:].any()
            num_checked += 1
        return draft

    def generate(max_tokens):
        for seed in range(3):
            engine.add(None, [1, 2], SamplingParams(max_tokens=max_tokens, seed=seed))
        while engine.num_unfinished:
            engine.step()

    monkeypatch.setattr(backend, "finish", checked)
    generate(2)
    monkeypatch.setattr(backend, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(20)
    for request in list(engine._scheduler.unfinished):
        engine.cancel(request)
    monkeypatch.setattr(backend, "finish", checked)
    for max_tokens in (3, 5, 20):
        generate(max_tokens)
    assert num_checked > 20
