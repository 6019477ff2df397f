"""Fingerprints are equal for the same model and differ between models."""

import shutil

import pytest
import torch
from huggingface_hub import constants

from draftwise.checkpoints.fingerprint import checkpoint_fingerprint
from draftwise.errors import ModelNotFoundError
from draftwise.models.loading import load_model

from ..refusals import error_of
from ..tiny_models import FAMILIES, Recipe, edit_config
from .loading_tools import CPU, load

RECIPE = Recipe(vocab=32)


def fingerprint(models, recipe, **options):
    return load(models.folder(recipe), **options).fingerprint


def test_the_name_does_not_matter(models, tmp_path):
    moved = shutil.copytree(models.folder(RECIPE), tmp_path / "moved")
    assert load(moved).fingerprint == fingerprint(models, RECIPE)


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
    folder = models.folder(RECIPE)
    quantised = {load(f"{folder}:{bits}").fingerprint for bits in ("int8", "int4")}
    assert len(quantised | {plain}) == 3


def test_another_configuration_differs(models, tmp_path):
    folder = shutil.copytree(models.folder(RECIPE), tmp_path / "edited")
    edit_config(folder, rms_norm_eps=1e-3)
    assert load(folder).fingerprint != fingerprint(models, RECIPE)


def test_fingerprint_of_files_equals_that_of_the_loaded_model(models):
    for family in FAMILIES:
        folder = models.folder(Recipe(family))
        assert checkpoint_fingerprint(folder) == load(folder).fingerprint, family


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match="safetensors") as caught:
        checkpoint_fingerprint(tmp_path, "draft")
    assert caught.value.field == "draft"


class TestHubIds:
    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    @pytest.fixture(autouse=True)
    def _offline(self, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    @pytest.fixture
    def cache(self, models, tmp_path):
        """A cache of downloaded models with one model, as huggingface_hub writes it."""
        repository = tmp_path / "cache" / "models--org--m"
        shutil.copytree(models.folder(RECIPE), repository / "snapshots" / self.COMMIT)
        (repository / "refs").mkdir()
        for revision in ("main", "stable"):
            (repository / "refs" / revision).write_text(self.COMMIT)
        return str(tmp_path / "cache")

    def test_the_files_in_the_cache_are_read(self, models, cache):
        for revision in [None, "stable", self.COMMIT]:
            found = checkpoint_fingerprint("org/m", "draft", revision, cache)
            assert found == fingerprint(models, RECIPE), revision

    def test_the_default_cache_is_that_of_the_hub(self, models, cache, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
        assert checkpoint_fingerprint("org/m") == fingerprint(models, RECIPE)

    def test_missing_models_name_their_role(self, cache):
        for name, revision, message in [
            ("org/m", "other", "nor can it be downloaded"),
            ("org/other", None, "nor can it be downloaded"),
            ("/does/not/exist", None, "neither a folder nor a hub id"),
        ]:
            caught = error_of(
                checkpoint_fingerprint,
                name,
                "companion",
                revision,
                cache,
                error=ModelNotFoundError,
                match=message,
            )
            assert caught.field == "companion", name
            assert name in caught.message
            assert "\n" not in str(caught), name
