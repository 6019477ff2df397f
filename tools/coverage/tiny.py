"""Tiny random models of any architecture, in folders."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.tiny_models import add_noise, randomise
from torch import Tensor

from .architectures import Architecture
from .overrides import FILES
from .reference import Reference
from .shrinking import tiny_config
from .verdicts import NotBuildableError, described

_MOST_PARAMETERS = 40_000_000
# Standard deviation of the logits: distributions are neither flat nor one-hot.
_SHARPNESS = 2.0
_SEED = 1
_WIDER = 8.0
# How much the draft's weights differ, relative to their size.
_NOISE = 0.1
# Relative to the logits' standard deviation of 2: between a model and the same one from a folder.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class TinyModel:
    """A tiny model in a folder.

    Attributes:
        folder: the folder of the model.
        draft: the folder of a model that agrees with it often, not always.
        reference: the model as ``transformers`` loads and computes it; ``None`` if it cannot.
        failure: why it cannot.
        loads: whether ``transformers`` loads it.
    """

    folder: Path
    draft: Path
    reference: Reference | None
    failure: str = ""
    loads: bool = True


def build(architecture: Architecture, root: Path) -> TinyModel:
    """Build a tiny model and a draft for it, and write them to folders.

    Raises:
        NotBuildableError: ``transformers`` cannot build or save it.
    """
    folder, draft = root / "model", root / "draft"
    try:
        model = _new_model(architecture)
        runs, failure = _attempt(model)
        _draw_weights(model, runs)
        model.save_pretrained(folder)
        for name in FILES.get(architecture.name, ()):
            torch.save({}, folder / name)
        other = copy.deepcopy(model)
        add_noise(other, _NOISE, _SEED)
        other.save_pretrained(draft)
    except Exception as error:
        raise NotBuildableError(f"transformers cannot build it: {described(error)}") from error
    if runs is None:
        return TinyModel(folder, draft, None, failure)
    try:
        return TinyModel(folder, draft, _loaded(architecture, folder, runs))
    except Exception as error:
        failure = f"transformers cannot load what it saves: {described(error)}"
        failure = failure.replace(str(folder), "MODEL")
        return TinyModel(folder, draft, None, failure, loads=False)


def _new_model(architecture: Architecture) -> Any:
    config = tiny_config(architecture.config_class)
    with torch.device("meta"):
        planned = architecture.auto_class.from_config(copy.deepcopy(config), dtype=torch.float32)
    size = planned.num_parameters()
    if size > _MOST_PARAMETERS:
        raise ValueError(f"its smallest form has {size} parameters")
    torch.manual_seed(_SEED)
    return architecture.auto_class.from_config(config, dtype=torch.float32).eval()


def _attempt(model: Any) -> tuple[Reference | None, str]:
    """The model as a reference, or why it does not run on a text."""
    try:
        return Reference(model), ""
    except Exception as error:
        return None, f"its own forward pass fails in transformers: {described(error)}"


@torch.no_grad()
def _draw_weights(model: Any, runs: Reference | None) -> None:
    if runs is None:
        randomise(model, _SEED, _SHARPNESS, lambda _: torch.tensor([0.0, 1.0]))
        return

    def logits(ids: Tensor) -> Tensor:
        scores = runs.logits(ids % runs.vocab)
        return scores[scores.isfinite()]

    head, embedding = runs.text.get_output_embeddings(), runs.text.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        _widen_last_norm(model, lambda: runs.logits(torch.tensor([[3, 4]])))
    randomise(model, _SEED, _SHARPNESS, logits, head)
    generator = torch.Generator().manual_seed(_SEED)
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name.endswith("_bias") and name in saved and buffer.is_floating_point():  # of routers
            buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))


def _widen_last_norm(model: Any, run: Callable[[], object]) -> None:
    """Let a head that is tied to the embedding read large states, so that its weights are small.

    Otherwise the last token is nearly always the most likely next one.
    """
    called: list[Any] = []
    norms = [
        module
        for module in model.modules()
        if getattr(module, "weight", None) is not None and module.weight.dim() == 1
    ]
    hooks = [each.register_forward_hook(lambda norm, *_: called.append(norm)) for each in norms]
    run()
    for hook in hooks:
        hook.remove()
    if called:
        # Whether it multiplies by the weight or by 1 + weight, which are 1 at first.
        called[-1].weight.add_(_WIDER - 1)


def _loaded(architecture: Architecture, folder: Path, built: Reference) -> Reference:
    """The saved model.

    Raises:
        ValueError: it computes other logits, as when weights are not found in the folder.
    """
    loaded = Reference(architecture.auto_class.from_pretrained(folder, dtype=torch.float32))
    text = torch.arange(3, min(40, built.vocab))[None]
    difference = (loaded.logits(text) - built.logits(text)).nan_to_num().abs().max().item()
    if difference > _ROUNDING:
        raise ValueError(f"the loaded model gives other logits, by {difference:.2g}")
    return loaded
