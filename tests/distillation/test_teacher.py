"""The target as a teacher."""

import pytest
import torch

from ..tiny_models import Recipe
from .conftest import load_target, tiny_teacher


@pytest.mark.parametrize("family", ["llama", "cohere", "gemma"])
def test_the_final_norm_is_read(models, family):
    recipe = Recipe(family, vocab=24, seed=3)
    weight = load_target(models, recipe).base_model.norm.weight
    applied = weight + 1 if family == "gemma" else weight
    norm = tiny_teacher(models, (1,), recipe).final_norm()
    torch.testing.assert_close(norm, applied.float(), rtol=1e-3, atol=1e-3)
