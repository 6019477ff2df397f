"""The configuration of a model in a GGUF file, from the file's metadata."""

from __future__ import annotations

from math import nextafter
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from draftwise.checkpoints.gguf.architectures import (
    ARCHITECTURES,
    IGNORED,
    WITHOUT_EFFECT,
    Architecture,
)
from draftwise.checkpoints.gguf.end_tokens import end_tokens
from draftwise.checkpoints.gguf.file import GgufFile
from draftwise.checkpoints.gguf.metadata import Metadata
from draftwise.checkpoints.gguf.rotary import read_rotary
from draftwise.checkpoints.gguf.shared_settings import Shape

HEAD = "output.weight"
_EMBEDDING = "token_embd.weight"


def read_configuration(file: GgufFile, max_model_len: int | None = None) -> Any:
    """The configuration of the model in a file.

    Args:
        file: the file.
        max_model_len: longest context that will be served; ``None`` for the model's own.

    Returns:
        A configuration of ``transformers``.

    Raises:
        UnsupportedModelError: the architecture, a key, or the value of a key is not supported.
    """
    metadata = Metadata(file)
    architecture = architecture_of(file)
    metadata.require("attention.causal", True, because="only causal models are served")
    if not architecture.has_mtp:
        because = "this architecture has no layers for drafting"
        metadata.require("nextn_predict_layers", 0, because=because)
    length = metadata.count("context_length")
    served = length if max_model_len is None else min(length, max_model_len)
    settings = _settings(metadata, architecture, length, served)
    metadata.ignore(IGNORED)
    metadata.ignore_values(WITHOUT_EFFECT)
    metadata.ignore(architecture.ignored)
    metadata.check_all_used()
    model_type = settings.pop("model_type", architecture.model_type)
    if model_type not in CONFIG_MAPPING:
        raise file.error(f"needs {model_type!r}, which this version of transformers does not have")
    try:
        return AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # checks of the configuration's class
        reason = str(error).strip().splitlines()
        raise file.error(
            f"has no valid configuration of {model_type!r}: {reason[0] if reason else error!r}"
        ) from error


def architecture_of(file: GgufFile) -> Architecture:
    """The architecture of a file.

    Raises:
        UnsupportedModelError: it is not supported.
    """
    known = ARCHITECTURES.get(file.architecture)
    if known is None:
        raise file.error(
            f"has the architecture {file.architecture!r}, which is not read from GGUF; these are: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return known


def is_tied(file: GgufFile) -> bool:
    """Whether the output projection of a file's model is its embedding."""
    return architecture_of(file).head is False or HEAD not in file.tensors


def _settings(
    metadata: Metadata, architecture: Architecture, length: int, served: int
) -> dict[str, Any]:
    """Arguments of the configuration."""
    file = metadata.file
    if metadata.num_mtp_layers and not any(name.startswith("blk.0.") for name in file.tensors):
        raise file.error(
            "contains an MTP layer without its model; use a file of the model that has the layer"
        )
    if _EMBEDDING not in file.tensors:
        raise file.error(f"has no tensor {_EMBEDDING!r}")
    if architecture.head and HEAD not in file.tensors:
        raise file.error(f"has no tensor {HEAD!r}")
    hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    if architecture.head_size is None:
        head_size = _head_size(metadata, architecture, hidden // heads)
    else:
        head_size = architecture.head_size(metadata)
    rotated = metadata.count("rope.dimension_count", head_size)
    if (
        rotated % 2
        or rotated > head_size
        or not (rotated == head_size or architecture.rotates_part)
    ):
        because = f"all {head_size} numbers of a head must be rotated"
        raise metadata.refuse("rope.dimension_count", because)
    rotary = read_rotary(metadata, rotated // 2, served, architecture.rotary_tensors)
    shape = Shape(hidden, metadata.num_layers, heads, head_size, rotary)
    own = architecture.settings(metadata, shape)
    norm = "layer_norm_epsilon" if architecture.has_layer_norms else "layer_norm_rms_epsilon"
    settings = {
        "vocab_size": file.tensors[_EMBEDDING][0],
        "hidden_size": hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": heads,
        "head_dim": head_size,
        "max_position_embeddings": length,
        architecture.epsilon: metadata.number(f"attention.{norm}"),
        "rope_parameters": rotary.parameters(),
        "tie_word_embeddings": is_tied(file),
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(end_tokens(file)) or None,
        "pad_token_id": None,
        **own,
    }
    if "num_key_value_heads" not in own:
        settings["num_key_value_heads"] = metadata.count("attention.head_count_kv", heads)
    if "intermediate_size" in own:
        metadata.ignore(["feed_forward_length"])
    else:
        inner = own.get("moe_intermediate_size")
        settings["intermediate_size"] = metadata.count("feed_forward_length", inner)
    # Configurations of such families have a share of their own where none is given.
    if architecture.rotates_part:
        share = _share(rotated, head_size)
        settings["rope_parameters"]["partial_rotary_factor"] = share
        settings["partial_rotary_factor"] = share  # where older versions of transformers look
    if settings["rope_parameters"].get("rope_type") == "longrope":
        settings["original_max_position_embeddings"] = rotary.original
    return settings


def _head_size(metadata: Metadata, architecture: Architecture, usual: int) -> int:
    size = metadata.count("attention.key_length", usual)
    if size != usual and not architecture.has_free_heads:
        raise metadata.refuse("attention.key_length", f"heads of this architecture have {usual}")
    if metadata.count("attention.value_length", usual) != size:
        raise metadata.refuse("attention.value_length", f"keys and values must have {size} numbers")
    return size


def _share(rotated: int, head_size: int) -> float:
    """The share of a head that is rotated. ``transformers`` rounds the product down."""
    share = rotated / head_size
    return share if int(head_size * share) == rotated else nextafter(share, 1.0)
