"""Formats of quantised weights: each loads with the weights it stands for, or is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from tests.models.quantized_folders import FORMATS as _ALL
from tests.models.quantized_folders import Format
from transformers import AutoModelForCausalLM

from draftwise.errors import DraftwiseError

from .comparison import check, load
from .reference import Reference
from .shrinking import CONTEXT
from .verdicts import NotBuildableError, RefusedError

FORMATS: Mapping[str, Format] = {each.name: each for each in _ALL}


def examine(name: str, root: Path) -> str:
    """Write a tiny quantised model, and compare it with the weights that it stands for.

    Args:
        name: one of :data:`FORMATS`.
        root: an empty folder.

    Returns:
        Nothing to remark.

    Raises:
        RefusedError: Draftwise does not load the model.
        NotBuildableError: the layers quantise their inputs too, so that the weights do not tell
            what the model computes.
        UnequalError: the texts are not those of the unquantised model.
    """
    chosen = FORMATS[name]
    chosen = replace(chosen, recipe=replace(chosen.recipe, context=CONTEXT))
    folder, dense = chosen.write(root)
    try:
        llm = load(folder)
    except DraftwiseError as error:
        raise RefusedError(str(error).replace(str(folder), "MODEL")) from error
    with llm:
        if chosen.inputs:
            raise NotBuildableError("loaded; only the package that wrote it can compute it as well")
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        check(llm, Reference(model), "with quantised weights")
    return ""
