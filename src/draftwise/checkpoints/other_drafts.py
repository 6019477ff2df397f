"""Drafts that are no models of their own, recognised by their ``config.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftwise.errors import UnsupportedModelError

# What to use in place of a draft that Draftwise does not run.
INSTEAD = "use 'suffix', a draft model or an EAGLE-3 head of the target instead"
# Heads that draft blocks, and all kinds that are recognised here and run as drafts.
BLOCK_HEADS = frozenset({"DFlash", "DFlash-2", "DSpark"})
GEMMA_ASSISTANT = "Gemma 4 assistant"
RUN_AS_DRAFTS = BLOCK_HEADS | {"P-EAGLE", GEMMA_ASSISTANT}
# What ``speculators`` calls the other kinds that Draftwise runs.
RUN_BY_DRAFTWISE = ("eagle", "eagle3")
_SPECULATORS = {
    "dflash": "DFlash",
    "dflash2": "DFlash-2",
    "dspark": "DSpark",
    "hydra": "Hydra",
    "medusa": "Medusa",
    "mlp": "MLP speculator",
    "mtp": "MTP",
    "peagle": "P-EAGLE",
}
# Marks of each kind: a pattern of architectures and model types, and settings that no other model
# has. The first kind with a mark decides: DSpark is DFlash with a Markov head, and has its settings
# too. Classes are named by vLLM, speculators, DeepSpec, SpecForge and the authors.
_MARKS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "DSpark": ("(?i:dspark)", ("markov_rank", "markov_head_type")),
    "DFlash-2": ("(?i:dflash_?2)", ()),
    "DFlash": ("(?i:dflash)", ("dflash_config",)),
    "P-EAGLE": ("(?i:p_?eagle)", ()),
    "Medusa": ("(?i:medusa)", ("medusa_num_heads",)),
    "Hydra": (None, ("hydra_num_heads",)),
    "MLP speculator": ("(?i:(mlp|lstm)_?speculator)", ()),
    "MTP": ("MTP|_mtp$", ()),
    GEMMA_ASSISTANT: ("(?i:^gemma4_?(unified)?_?assistant)", ()),
    "assistant": ("_assistant$|Assistant(ForCausalLM|Model)$", ()),
}
# The token that stands for those to be predicted, in a head with the class of EAGLE-3.
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
_OF_DFLASH_2 = ("conv_kernel_size", "selector_rank")


def other_kind(config: Mapping[str, Any]) -> str | None:
    """The kind of a draft that is no model of its own; ``None`` for EAGLE and for any other model.

    Args:
        config: the contents of a ``config.json``.
    """
    kind = config.get("speculators_model_type")
    if kind is not None:
        return None if kind in RUN_BY_DRAFTWISE else _SPECULATORS.get(str(kind), str(kind))
    found = config.get("architectures")
    architectures = found if isinstance(found, list) else []
    names = [str(each) for each in (*architectures, config.get("model_type", ""))]
    for kind, (pattern, settings) in _MARKS.items():
        has_name = pattern is not None and any(re.search(pattern, name) for name in names)
        if has_name or any(map(config.get, settings)):
            nested = config.get("dflash_config")
            is_second = isinstance(nested, Mapping) and any(map(nested.get, _OF_DFLASH_2))
            return "DFlash-2" if kind == "DFlash" and is_second else kind
    is_eagle3 = any("eagle3" in name.lower() for name in names)
    has_mask = any(config.get(name) is not None for name in MASK_TOKENS)
    return "P-EAGLE" if is_eagle3 and has_mask else None


def refuse_other_draft(config: Mapping[str, Any], name: str, role: str) -> None:
    """Refuse a draft of a kind that Draftwise does not run in a role.

    Args:
        config: the contents of its ``config.json``.
        name: the user's name for it.
        role: its role; named in the error.

    Raises:
        UnsupportedModelError: it is such a draft. The error names its kind and the remedy.
    """
    kind = other_kind(config)
    if kind is not None and not (role == "draft" and kind in RUN_AS_DRAFTS):
        raise other_draft(kind, name, role)


def refuse_other_draft_in(folder: Path, name: str, role: str) -> None:
    """Refuse a folder with such a draft. See :func:`refuse_other_draft`."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the loader of models reports it
        return
    if isinstance(config, dict):
        refuse_other_draft(config, name, role)


def other_draft(kind: str, name: str, role: str) -> UnsupportedModelError:
    """The error for a draft of a kind that Draftwise does not run."""
    remedy = {
        "target": "is no model of its own; name the model that it drafts for",
        "draft": f"is not run by Draftwise yet; {INSTEAD}",
    }
    reason = remedy.get(role, "is no model of its own; name a model")
    return UnsupportedModelError(role, f"{name!r} is a draft of the kind {kind}, which {reason}")
