"""The models of the recipe's stages: new, saved and loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from draftwise.training.llama import new_llama
from draftwise.zoo.hybrid import Hybrid, load_hybrid, new_hybrid, save_hybrid
from draftwise.zoo.recipe import HybridShape, Stage


def new_model(stage: Stage, teacher: LlamaForCausalLM | None) -> PreTrainedModel:
    """The model of a stage at the beginning of its training.

    Args:
        stage: the stage.
        teacher: the model that it is distilled from, with whose weights a hybrid begins.
    """
    if not isinstance(stage.shape, HybridShape):
        return new_llama(stage.shape.config(), stage.seed)
    assert teacher is not None
    return new_hybrid(stage.shape.config(), stage.seed, teacher)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Write the weights and the configuration of a model."""
    if isinstance(model, Hybrid):
        save_hybrid(model, folder)
    else:
        model.save_pretrained(str(folder))


def load_model(stage: Stage, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Read the model of a stage that :func:`save_model` wrote."""
    if isinstance(stage.shape, HybridShape):
        return load_hybrid(folder, dtype)
    return LlamaForCausalLM.from_pretrained(str(folder), dtype=dtype)
