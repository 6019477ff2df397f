"""Helpers that load a single model, or expect that loading it is refused."""

import pytest
import torch
import transformers

from draftwise.errors import UnsupportedModelError
from draftwise.models.loading import load_model

from ..tiny_models import save

CPU = torch.device("cpu")
_SMALL = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def load(folder, role="target", max_model_len=None, **options):
    return load_model(str(folder), role, torch.float32, CPU, max_model_len, **options)


def refused(folder, error=UnsupportedModelError, role="target", **options):
    with pytest.raises(error) as caught:
        load(folder, role, **options)
    return caught.value


def tiny(tmp_path, class_name, **settings):
    """The folder of a tiny model of any architecture, with random weights by ``transformers``."""
    config = getattr(transformers, f"{class_name}Config")(**{**_SMALL, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return save(model, tmp_path / class_name)
