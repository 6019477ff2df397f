"""The files of a drafting head: a folder, or a repository of the Hugging Face hub."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, list_repo_files, snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftwise.checkpoints.heads.block_parsing import (
    is_block_head_config,
    parse_block_head_config,
)
from draftwise.checkpoints.heads.config import DraftHeadConfig
from draftwise.checkpoints.heads.origin import TRAINING_FILE
from draftwise.checkpoints.heads.parsing import (
    is_head_config,
    may_be_head_config,
    parse_head_config,
)
from draftwise.checkpoints.heads.weights import HeadWeights, check_head_weights, is_head_tensor
from draftwise.checkpoints.hub import cached_config, find_on_hub, has_tokenizer
from draftwise.checkpoints.lfs import refuse_lfs_pointers
from draftwise.checkpoints.other_drafts import (
    GEMMA_ASSISTANT,
    other_kind,
    refuse_other_draft_in,
)
from draftwise.checkpoints.tensor_names import SAFE_FILES, tensor_names
from draftwise.errors import ModelNotFoundError, UnsupportedModelError

_ROLE = "draft"
_CONFIG = "config.json"
_PICKLED = ("*.bin", "*.pt")


def find_head(location: str) -> Path | None:
    """The folder of a drafting head.

    Args:
        location: a folder, or a hub id. Of a repository of the hub, the weights are downloaded if
            its configuration is that of a head or of one layer. They are also if it has no
            tokenizer, as the configuration of a head may be a copy of its target's.

    Returns:
        ``None`` if there is no head, such as where there is an ordinary model.

    Raises:
        UnsupportedModelError: there is a draft of another kind, which Draftwise does not run.
        ModelNotFoundError: the hub cannot be reached and the repository is not in the local cache,
            or the folder has pointers of Git LFS in place of its files.
    """
    name = location
    if not Path(location).is_dir():
        cached = cached_config(location)
        if cached is not None:
            refuse_other_draft_in(cached.parent, name, _ROLE)
            if not _may_be_head(cached) and has_tokenizer(os.listdir(cached.parent)):
                return None  # the hub is not asked twice for an ordinary model
        location = find_on_hub(location, _ROLE)
    if not Path(location).is_dir():
        try:
            config = Path(hf_hub_download(location, _CONFIG))
        except (HfHubHTTPError, OSError):  # the loader of ordinary models reports what is missing
            return None
        refuse_other_draft_in(config.parent, name, _ROLE)
        if not _may_be_head(config) and _has_tokenizer_on_hub(location):
            return None
        try:
            location = snapshot_download(
                location, allow_patterns=[_CONFIG, TRAINING_FILE, SAFE_FILES, *_PICKLED]
            )
        except (HfHubHTTPError, OSError) as error:
            raise ModelNotFoundError(
                _ROLE, f"cannot download the head {location!r}: {error}"
            ) from error
    folder = Path(location)
    refuse_other_draft_in(folder, name, _ROLE)
    refuse_lfs_pointers(folder, _ROLE)
    return folder if _is_head(folder) else None


def read_head_config(folder: str | Path) -> DraftHeadConfig:
    """Read the configuration of a head and the names of its tensors.

    Args:
        folder: a folder for which :func:`find_head` returns itself.

    Raises:
        UnsupportedModelError: the head is not supported, or its configuration is damaged.
    """
    path = Path(folder)
    config = read_json(path)
    if is_assistant_config(config):
        raise UnsupportedModelError(
            _ROLE, f"{str(folder)!r} is a {GEMMA_ASSISTANT}; name a head of EAGLE or a draft model"
        )
    if is_block_head_config(config):
        return parse_block_head_config(config)
    return parse_head_config(config, [*_tensor_names(path)])


def read_head(folder: str | Path) -> tuple[DraftHeadConfig, HeadWeights]:
    """Read the configuration and the weights of a head, and check them against each other.

    Args:
        folder: a folder for which :func:`find_head` returns itself.

    Returns:
        The configuration, and the weights as they are stored.

    Raises:
        ModelNotFoundError: there are no weights.
        UnsupportedModelError: the head is not supported, or its files are damaged, incomplete, or
            contain more than tensors.
    """
    path = Path(folder)
    config = read_head_config(path)
    return config, check_head_weights(config, read_tensors(path))


def _has_tokenizer_on_hub(name: str) -> bool:
    """Whether a repository of the hub has a tokenizer; true if its files cannot be listed."""
    try:
        return has_tokenizer(list_repo_files(name))
    except Exception:  # depends on the HTTP library that huggingface_hub uses
        return True


def _may_be_head(path: Path) -> bool:
    """Whether a file may be the configuration of a head. Damaged files are not."""
    try:
        config = read_json(path.parent)
        return (
            may_be_head_config(config)
            or is_block_head_config(config)
            or is_assistant_config(config)
        )
    except UnsupportedModelError:
        return False


def _is_head(folder: Path) -> bool:
    """Whether a folder contains a head, by its configuration or else by its tensors' names."""
    try:
        config = read_json(folder)
    except UnsupportedModelError:
        return False
    if is_head_config(config) or is_block_head_config(config) or is_assistant_config(config):
        return True
    return any(map(is_head_tensor, _tensor_names(folder)))


def _tensor_names(folder: Path) -> Iterator[str]:
    """The names of a folder's tensors. Files that cannot be read have none."""
    yield from tensor_names(folder)
    if not any(folder.glob(SAFE_FILES)):
        for file in _pickled_files(folder):
            with suppress(UnsupportedModelError):
                # PyTorch maps files of its current format, of which little is read here.
                yield from _unpickled(file, mapped=zipfile.is_zipfile(file))


def _pickled_files(folder: Path) -> list[Path]:
    return sorted(file for pattern in _PICKLED for file in folder.glob(pattern))


def is_assistant_config(config: Mapping[str, Any]) -> bool:
    """Whether the contents of a ``config.json`` are those of an assistant of Gemma 4."""
    return other_kind(config) == GEMMA_ASSISTANT


def is_assistant(folder: Path) -> bool:
    """Whether a folder for which :func:`find_head` returns itself is an assistant of Gemma 4."""
    return is_assistant_config(read_json(folder))


def read_json(folder: Path) -> Mapping[str, Any]:
    """The contents of a folder's ``config.json``.

    Raises:
        UnsupportedModelError: it cannot be read, or is no JSON object.
    """
    path = folder / _CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(_ROLE, f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UnsupportedModelError(_ROLE, f"{str(path)!r} is not a JSON object")
    return found


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from safetensors files or else from pickled ones.

    Raises:
        ModelNotFoundError: there are no weights.
        UnsupportedModelError: a file is damaged, or contains more than tensors.
    """
    tensors: dict[str, Tensor] = {}
    files = sorted(folder.glob(SAFE_FILES))
    if files:
        for file in files:
            try:
                tensors |= load_file(file)
            except (SafetensorError, OSError) as error:
                raise UnsupportedModelError(_ROLE, f"{file.name!r} is damaged: {error}") from error
        return tensors
    files = _pickled_files(folder)
    if not files:
        raise ModelNotFoundError(
            _ROLE, f"the folder {str(folder)!r} has no weights (.safetensors, .bin or .pt)"
        )
    for file in files:
        tensors |= _unpickled(file)
    return tensors


def _unpickled(file: Path, mapped: bool = False) -> dict[str, Tensor]:
    """The tensors of a file, read into memory unless they are to be mapped."""
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise UnsupportedModelError(
            _ROLE, f"{file.name!r} contains more than tensors, so it is not loaded"
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedModelError(_ROLE, f"{file.name!r} is damaged: {reason[0]}") from error
    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
        raise UnsupportedModelError(
            _ROLE, f"{file.name!r} contains more than tensors, so it is not loaded"
        )
    return found
