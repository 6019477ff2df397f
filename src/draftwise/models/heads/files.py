"""The files of a drafting head: a folder, or a repository of the Hugging Face hub."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from draftwise.errors import ModelNotFoundError, UnsupportedModelError
from draftwise.models.heads.config import HeadConfig
from draftwise.models.heads.origin import TRAINING_FILE
from draftwise.models.heads.parsing import is_head_config, may_be_head_config, parse_head_config
from draftwise.models.heads.weights import HeadWeights, check_head_weights, is_eagle_tensor
from draftwise.models.hub import find_on_hub
from draftwise.models.lfs import refuse_lfs_pointers

_ROLE = "draft"
_CONFIG = "config.json"
_SAFE, _PICKLED = "*.safetensors", ("*.bin", "*.pt")


def find_head(location: str) -> Path | None:
    """The folder of a drafting head.

    Args:
        location: a folder, or a hub id. Of a repository of the hub, the weights are downloaded if
            it contains a head, or a model of one layer, which may be one.

    Returns:
        ``None`` if there is no head, such as where there is an ordinary model.

    Raises:
        ModelNotFoundError: the hub cannot be reached and the repository is not in the local cache,
            or the folder has pointers of Git LFS in place of its files.
    """
    if not Path(location).is_dir():
        cached = _cached_config(location)
        if cached is not None and not _may_be_head(cached):
            return None  # the hub is not asked twice for an ordinary model
        location = find_on_hub(location, _ROLE)
    if not Path(location).is_dir():
        try:
            config = hf_hub_download(location, _CONFIG)
        except (HfHubHTTPError, OSError):  # the loader of ordinary models reports what is missing
            return None
        if not _may_be_head(Path(config)):
            return None
        try:
            location = snapshot_download(
                location, allow_patterns=[_CONFIG, TRAINING_FILE, _SAFE, *_PICKLED]
            )
        except (HfHubHTTPError, OSError) as error:
            raise ModelNotFoundError(
                _ROLE, f"cannot download the head {location!r}: {error}"
            ) from error
    folder = Path(location)
    refuse_lfs_pointers(folder, _ROLE)
    return folder if _is_head(folder) else None


def read_head_config(folder: str | Path) -> HeadConfig:
    """Read the configuration of a head, without its weights.

    Args:
        folder: a folder for which :func:`find_head` returns itself.

    Raises:
        UnsupportedModelError: the head is not supported, or its configuration is damaged.
    """
    return parse_head_config(_read_config(Path(folder) / _CONFIG))


def read_head(folder: str | Path) -> tuple[HeadConfig, HeadWeights]:
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
    return config, check_head_weights(config, _read_tensors(path))


def _cached_config(name: str) -> Path | None:
    """The configuration of a hub's repository in the local cache; ``None`` if it is not there."""
    try:
        cached = try_to_load_from_cache(name, _CONFIG)
    except HFValidationError:  # not a hub id
        return None
    return Path(cached) if isinstance(cached, str) else None


def _may_be_head(path: Path) -> bool:
    """Whether a file may be the configuration of a head. Damaged files are not."""
    try:
        return may_be_head_config(_read_config(path))
    except UnsupportedModelError:
        return False


def _is_head(folder: Path) -> bool:
    """Whether a folder contains a head, by its configuration or else by its tensors' names."""
    path = folder / _CONFIG
    if not _may_be_head(path):
        return False
    return is_head_config(_read_config(path)) or any(map(is_eagle_tensor, _tensor_names(folder)))


def _tensor_names(folder: Path) -> Iterator[str]:
    """The names of a folder's tensors. Files that cannot be read have none."""
    files = sorted(folder.glob(_SAFE))
    for file in files:
        with suppress(SafetensorError, OSError), safe_open(file, framework="pt") as tensors:
            yield from tensors.keys()
    if not files:
        for file in _pickled_files(folder):
            with suppress(UnsupportedModelError):
                # PyTorch maps files of its current format, of which little is read here.
                yield from _unpickled(file, mapped=zipfile.is_zipfile(file))


def _pickled_files(folder: Path) -> list[Path]:
    return sorted(file for pattern in _PICKLED for file in folder.glob(pattern))


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(_ROLE, f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UnsupportedModelError(_ROLE, f"{str(path)!r} is not a JSON object")
    return found


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from safetensors files or else from pickled ones."""
    tensors: dict[str, Tensor] = {}
    files = sorted(folder.glob(_SAFE))
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
