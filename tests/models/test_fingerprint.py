"""Fingerprints are equal for the same model and differ between models."""

import shutil

import pytest
import torch

from draftwise.errors import ModelNotFoundError
from draftwise.models.fingerprint import checkpoint_fingerprint
from draftwise.models.loading import load_model, locate

from ..tiny_models import FAMILIES, Recipe, edit_config
from .loading_tools import CPU, load

RECIPE = Recipe(vocab=32)


def fingerprint(models, recipe, **options):
    return load(models.folder(recipe), **options).fingerprint


@pytest.mark.parametrize("family", FAMILIES)
def test_the_name_does_not_matter(models, tmp_path, family):
    folder = models.folder(Recipe(family))
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert load(moved).fingerprint == load(folder).fingerprint


def test_role_type_and_context_do_not_matter(models):
    folder = models.folder(RECIPE)
    expected = fingerprint(models, RECIPE)
    assert fingerprint(models, RECIPE, role="draft", max_model_len=16) == expected
    assert load_model(folder, "target", torch.bfloat16, CPU).fingerprint == expected


def test_other_models_differ(models):
    others = [
        RECIPE,
        RECIPE.draft(0.001),
        Recipe(vocab=32, seed=1),
        Recipe(vocab=31),
        Recipe("qwen2", vocab=32),
    ]
    prints = {fingerprint(models, recipe) for recipe in others}
    assert len(prints) == len(others)


def test_a_quantised_model_differs(models):
    plain = fingerprint(models, RECIPE)
    quantised = {fingerprint(models, RECIPE, quantization=bits) for bits in ("int8", "int4")}
    assert len(quantised | {plain}) == 3


def test_another_configuration_differs(models, tmp_path):
    folder = shutil.copytree(models.folder(RECIPE), tmp_path / "edited")
    edit_config(folder, rms_norm_eps=1e-3)
    assert load(folder).fingerprint != fingerprint(models, RECIPE)


@pytest.mark.parametrize("family", FAMILIES)
def test_fingerprint_of_files_equals_that_of_the_loaded_model(models, family):
    folder = models.folder(Recipe(family))
    assert checkpoint_fingerprint(folder) == load(folder).fingerprint


@pytest.mark.parametrize("name", ["zoo:target", "zoo:draft"])
def test_fingerprint_of_zoo_files_equals_that_of_the_loaded_model(name):
    assert checkpoint_fingerprint(locate(name, "model")) == load(name).fingerprint


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        checkpoint_fingerprint(tmp_path)
