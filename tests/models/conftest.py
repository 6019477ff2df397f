import shutil
from pathlib import Path

import pytest

from ..tiny_models import Recipe


@pytest.fixture
def llama(models, tmp_path):
    """A model's folder that a test may change."""
    return Path(shutil.copytree(models.folder(Recipe(vocab=32, tokenizer=True)), tmp_path / "m"))
