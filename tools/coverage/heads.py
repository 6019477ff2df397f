"""Layouts of drafting heads: each loads for a tiny target, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tests.tiny_blocks import BlockRecipe
from tests.tiny_eagle_heads import EagleRecipe
from tests.tiny_heads import HeadRecipe
from tests.tiny_models import Recipe, save
from transformers import AutoModelForCausalLM

from draftwise import SpeculationConfig
from draftwise.errors import DraftwiseError

from .comparison import check, load
from .reference import Reference
from .shrinking import CONTEXT
from .verdicts import RefusedError

_VOCAB = 32
# Writes a head of a layout to a folder.
_Writer = Callable[[Path], object]


def _eagle3(layout: str) -> _Writer:
    head = HeadRecipe(vocab=_VOCAB, draft_vocab=_VOCAB // 2)
    return lambda folder: head.save(folder, layout)


def _eagle(layout: str) -> _Writer:
    head = EagleRecipe(layout, vocab=_VOCAB)
    return lambda folder: head.save(folder)


def _block(layout: str, markov: str | None) -> _Writer:
    discards = layout != "deepspec"
    head = BlockRecipe(vocab=_VOCAB, markov=markov, discards_anchor=discards)
    return lambda folder: head.save(folder, layout)


def _second(folder: Path) -> None:
    BlockRecipe(vocab=_VOCAB, second=True).save(folder)


def _parallel(folder: Path) -> None:
    settings = {"mask_token_id": 3, "speculators_model_type": "peagle"}
    head = HeadRecipe(vocab=_VOCAB, draft_vocab=_VOCAB // 2)
    head.save(folder, changes=settings, tensors={"mask_hidden": torch.ones(1, 1, 48)})


LAYOUTS: Mapping[str, _Writer] = {
    "EAGLE-3 (SafeAILab)": _eagle3("safeailab"),
    "EAGLE-3 (speculators)": _eagle3("speculators"),
    "EAGLE-1 and EAGLE-2 (SafeAILab)": _eagle("safeailab"),
    "EAGLE-1 and EAGLE-2 (speculators)": _eagle("speculators"),
    "DFlash (z-lab)": _block("z-lab", None),
    "DFlash (speculators)": _block("speculators", None),
    "DSpark (DeepSpec)": _block("deepspec", "vanilla"),
    "DSpark (speculators)": _block("speculators", "rnn"),
    "DFlash-2 (z-lab)": _second,
    "P-EAGLE (speculators)": _parallel,
}


def examine(layout: str, root: Path) -> str:
    """Write a tiny target and a head for it, and compare the target's texts with drafts of it.

    Args:
        layout: one of :data:`LAYOUTS`.
        root: an empty folder.

    Returns:
        Nothing to remark.

    Raises:
        RefusedError: Draftwise does not load the head.
        UnequalError: the texts are not the target's.
    """
    target, head = root / "target", root / "head"
    save(Recipe(vocab=_VOCAB, context=CONTEXT).build(), target)
    LAYOUTS[layout](head)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    try:
        llm = load(
            target,
            speculation=SpeculationConfig(
                str(head), policy="fixed", num_speculative_tokens=3, guard=False
            ),
            max_model_len=None,
        )
    except DraftwiseError as error:
        raise RefusedError(str(error).replace(str(head), "HEAD")) from error
    with llm:
        check(llm, Reference(model), "with the head", drafts=True)
    return ""
