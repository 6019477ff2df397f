"""Check that a model has read all of a checkpoint that changes what it computes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftwise.errors import UnsupportedModelError

# Patterns of the names of tensors that a causal language model does not need, with the reason.
# Those that a class of ``transformers`` declares itself, such as layers that predict several
# tokens, are not in its report.
_UNNEEDED = (
    # Computed from the configuration.
    r"rotary_(pos_)?emb\.(\w+_)?inv_freq$",
    # Masks of causal attention, of constant value.
    r"(^|\.)(attn|attention|self_attn)\.(masked_)?bias$",
    r"(^|\.)(masked_bias|causal_mask|position_ids)$",
    # Ranges of stored keys and values of 8 bits. Keys and values are stored in the model's type.
    r"(^|\.)(k|v|kv)_(cache_)?scale$",
    # Positions of constant value, and the version of a file.
    r"(^|\.)(embed_positions\.weights|version)$",
    # Other outputs: classes, values and rewards.
    r"(^|\.)(score|classifier|classification_head|qa_outputs|pooler|seq_relationship)\.",
    r"(^|\.)(v_head|value_head|reward_head)\.",
    # Images, video and sound.
    r"(^|\.)(vision|visual|image|video|audio|speech|multi_modal|multimodal|mm)(_\w+)?\.",
    r"(^|\.)embed_(vision|audio)\.",
    # Layers that predict several tokens.
    r"(^|\.)mtp(_\w+)?\.",
)
_UNNEEDED_PATTERN = re.compile("|".join(_UNNEEDED))
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def check_complete(
    report: Mapping[str, Any], config: Any, role: str, name: str, absent: Sequence[str] = ()
) -> None:
    """Refuse a model that lacks tensors, or that has not read a tensor which it may need.

    Args:
        report: the report of ``from_pretrained`` about the tensors.
        config: the model's configuration.
        role: the model's role; named in errors.
        name: the user's name for the model.
        absent: names of the modules that were not loaded, whose tensors are not read.

    Raises:
        UnsupportedModelError: names such a tensor.
    """
    missing = sorted(report["missing_keys"])
    if missing:
        raise UnsupportedModelError(
            role,
            f"the weights of {name!r} are not a complete causal language model: "
            f"{len(missing)} are missing, such as {missing[0]}",
        )
    parts = tuple(f"{each}." for each in absent)
    unread = sorted(
        each
        for each in report["unexpected_keys"]
        if not _is_unneeded(each, config) and not each.startswith(parts)
    )
    if unread:
        raise UnsupportedModelError(
            role,
            f"{type(config).__name__} has no use for {len(unread)} of the weights of {name!r}, "
            f"such as {unread[0]}, so that the model would compute something else; its "
            "configuration does not describe its weights",
        )


def _is_unneeded(name: str, config: Any) -> bool:
    if _UNNEEDED_PATTERN.search(name):
        return True
    # Layers after the last one predict several tokens.
    layer = _LAYER.search(name)
    text = config.get_text_config()
    extra = getattr(text, "num_nextn_predict_layers", None) or 0
    count = getattr(text, "num_hidden_layers", 0)
    return layer is not None and 0 <= int(layer[2]) - count < extra
