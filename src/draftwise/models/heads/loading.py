"""Loading of drafting heads for a target."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from draftwise import zoo
from draftwise.checkpoints.fingerprint import tensors_fingerprint
from draftwise.checkpoints.gguf import is_gguf
from draftwise.checkpoints.heads.block_config import BlockHeadConfig
from draftwise.checkpoints.heads.config import DraftHeadConfig, HeadConfig, HeadKind
from draftwise.checkpoints.heads.files import (
    find_head,
    is_assistant,
    read_head,
    read_head_config,
)
from draftwise.checkpoints.heads.origin import warn_of_other_target
from draftwise.checkpoints.heads.weights import MASK_STATE
from draftwise.checkpoints.source import locate, split_name
from draftwise.errors import InvalidParameterError, ModelNotFoundError, UnsupportedModelError
from draftwise.models.heads.assistant_loading import load_assistant
from draftwise.models.heads.block_model import BlockHeadModel
from draftwise.models.heads.block_spec import block_spec
from draftwise.models.heads.draft_head import DraftHead
from draftwise.models.heads.model import HeadModel
from draftwise.models.heads.parallel_model import ParallelHeadModel
from draftwise.models.heads.spec import eagle_spec, head_layers, head_spec
from draftwise.models.loading import LoadedModel

_EMBEDDING = "embed_tokens.weight"


def find_named_head(name: str) -> Path | None:
    """The folder of the head with a user's name: a folder, a zoo name, or a hub id.

    Args:
        name: the name of a draft, with or without a quantisation.

    Returns:
        ``None`` for another kind of draft.

    Raises:
        ModelNotFoundError: there is no such model.
        InvalidParameterError: it is a head with a quantisation.
    """
    plain, quantization = split_name(name)
    folder = None if is_gguf(plain) else find_head(locate(plain, "draft"))
    if folder is not None and quantization is not None:
        raise InvalidParameterError("draft", f"{plain!r} is a head, which is not quantised")
    return folder


def is_bundled_or_local_head(name: str, role: str) -> bool:
    """Whether a zoo name or a folder is that of a head.

    Args:
        name: the name of a model, without a quantisation.
        role: the model's role; named in errors.

    Raises:
        ModelNotFoundError: there is no such bundled model, or the folder contains none.
    """
    is_known = name.startswith(zoo.PREFIX) or Path(name).expanduser().is_dir()
    return is_known and not is_gguf(name) and find_head(locate(name, role)) is not None


def check_head_kind(name: str, method: str) -> None:
    """Refuse a draft that is not a head of the kind that the user named.

    Args:
        name: the name of the draft.
        method: ``"eagle"`` or ``"eagle3"``.

    Raises:
        UnsupportedModelError: it is no head, or one of another kind.
        ModelNotFoundError: there is no such model.
        InvalidParameterError: it is a head with a quantisation.
    """
    folder = find_named_head(name)
    if folder is None:
        raise UnsupportedModelError(
            "draft",
            f"{name!r} is no head, for which the method is {method!r}; leave out the method, or "
            "set 'draft_model'",
        )
    kind = read_head_config(folder).kind
    if kind.method != method:
        raise UnsupportedModelError(
            "draft",
            f"{name!r} is a head of {kind.label}, and the method is {method!r}; set "
            f"{kind.method!r}, or leave it out",
        )


def names_head(name: str) -> bool:
    """Whether the name of a draft is that of a head. A model that is not found is no head.

    Raises:
        InvalidParameterError: it is a head with a quantisation.
    """
    try:
        return find_named_head(name) is not None
    except ModelNotFoundError:
        return False


def load_head(name: str, folder: Path, target: LoadedModel, dtype: torch.dtype) -> LoadedModel:
    """Load a head for a target.

    Args:
        name: the user's name for it.
        folder: its folder; see :func:`draftwise.models.heads.find_head`.
        target: the target, on whose device the head runs, and whose embedding it reads where it has
            none of its own.
        dtype: dtype that the weights are converted to.

    Raises:
        ModelNotFoundError: the folder contains no weights.
        UnsupportedModelError: the head is not supported, its files are damaged, or it was made for
            another target.
    """
    if is_assistant(folder):
        return load_assistant(name, folder, target, dtype)
    config, weights = read_head(folder)
    model = target.model
    config.check_target(model.hidden_size, model.vocab_size, len(model.layers))
    warn_of_other_target(name, folder, target.name, target.fingerprint)
    # Acceptance profiles know a head by what it computes.
    computed = {key: each for key, each in asdict(config).items() if key != "counted_layers"}
    if computed.get("mask_token_id") is None:
        computed.pop("mask_token_id", None)
    settings = json.dumps(computed, sort_keys=True)
    tensors = {name: each.to(model.device, dtype) for name, each in weights.tensors.items()}
    embedding = model.embedding
    own = tensors.pop(_EMBEDDING, None)
    if own is None:
        if embedding.shape[1] != config.hidden_size:
            raise UnsupportedModelError(
                "draft",
                f"the head has no {_EMBEDDING}, and the target's embedding has the width "
                f"{embedding.shape[1]}, not {config.hidden_size}",
            )
    elif not _is_same(own, embedding):
        embedding = own
    size = sum(each.numel() for each in tensors.values())
    return LoadedModel(
        name,
        _described(config, tensors, embedding.to(dtype), weights.target_ids, target),
        None,
        target.max_model_len,
        frozenset(),
        size,
        tensors_fingerprint(settings, weights.tensors),
    )


def _described(
    config: DraftHeadConfig,
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    target_ids: Tensor,
    target: LoadedModel,
) -> DraftHead:
    """The head of a kind, of checked weights."""
    model = target.model
    states = config.states_of(len(model.layers))
    if isinstance(config, BlockHeadConfig):
        block = block_spec(config, tensors, embedding, target.max_model_len)
        return BlockHeadModel(block, states, target_ids, model)
    assert isinstance(config, HeadConfig)
    layers = head_layers(config, target.max_model_len)
    if config.kind is HeadKind.EAGLE:
        return HeadModel(eagle_spec(config, tensors, embedding), layers, states, target_ids, model)
    spec = head_spec(config, tensors, embedding)
    mask = config.mask_token_id
    if mask is None:
        return HeadModel(spec, layers, states, target_ids, model)
    state = tensors[MASK_STATE]
    return ParallelHeadModel(spec, layers, states, target_ids, model, mask, state)


def _is_same(own: Tensor, embedding: Tensor) -> bool:
    """Whether a head's embedding is a copy of the target's, which is then stored once."""
    count = len(own)
    return (
        own.shape[1] == embedding.shape[1]
        and own.dtype == embedding.dtype
        and count <= len(embedding)
        and torch.equal(own, embedding[:count])
    )
