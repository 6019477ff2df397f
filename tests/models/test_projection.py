"""A model's projection of its own last hidden states gives its own logits."""

import pytest
import torch

from draftwise.kernels.native import library
from draftwise.kernels.native.library import native_library
from draftwise.kernels.native.projection import NativeProjection
from draftwise.models.hidden_states import StateTap
from draftwise.models.loading import load_model
from draftwise.models.segment import Segment

from ..tiny_models import Recipe

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
FAMILIES = {
    "llama": Recipe(vocab=33),
    "gemma2": Recipe("gemma2", vocab=33, config={"final_logit_softcapping": 3.0}),
    "granite": Recipe("granite", vocab=33, config={"logits_scaling": 2.0}),
    "mixtral": Recipe("mixtral", vocab=33),
    "gpt2": Recipe("gpt2", vocab=33),
}


@torch.inference_mode()
@pytest.mark.covering("family", "dtype", "quantization", "kernels")
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("quantization", ["", ":int8"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_projection_gives_the_logits(models, monkeypatch, family, dtype, quantization, kernels):
    if not kernels:
        monkeypatch.setattr(library, "_load", lambda: (None, "left out"))
    folder = models.folder(FAMILIES[family]) + quantization
    model = load_model(folder, "target", dtype, CPU).model
    tap = StateTap((len(model.layers),))
    cache = model.new_cache(2, 16)
    tokens = list(range(9))
    logits = model.forward(cache, tokens, [Segment(0, 0, 4), Segment(1, 0, 5)], range(9), tap)
    projection = model.projection()
    if kernels and native_library() is not None and family in ("llama", "gemma2", "granite"):
        assert isinstance(projection, NativeProjection)
    features = model.final_norm()(tap.rows)
    assert projection(features[:0]).shape == (0, 33)
    # Calls of other sizes in between.
    assert projection(features[3:4]).shape == (1, 33)
    error = (projection(features).float() - logits.float()).square().mean().sqrt()
    assert error < TOLERANCE[dtype] * logits.float().std()
