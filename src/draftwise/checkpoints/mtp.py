"""Layers of a target that predict several tokens at once (MTP)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from draftwise.checkpoints.gguf import GgufFile, find_gguf, is_gguf, num_mtp_layers
from draftwise.checkpoints.hub import cached_config
from draftwise.checkpoints.mtp_folder import find_mtp
from draftwise.checkpoints.other_drafts import INSTEAD
from draftwise.checkpoints.source import locate_files, split_name
from draftwise.checkpoints.tensor_names import tensor_names
from draftwise.core.formats import MTP_METHOD, is_mtp
from draftwise.errors import UnsupportedModelError

_CONFIG = "config.json"
# How families count the layers in their configuration, or in a part of it.
_COUNTS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "num_mtp_modules",
)
_PARTS = ("text_config", "mtp_config")
# Names of tensors that only such layers have: Qwen's and MiMo's, DeepSeek's and GLM's.
_TENSOR = re.compile(r"(^|\.)mtp[._]|\.(eh_proj|enorm|hnorm)\.")


def names_mtp(name: str) -> bool:
    """Whether the name of a draft, by any of vLLM's names, is that of the target's MTP layer."""
    return is_mtp(name) and not Path(name).exists()


def drafts_with_mtp(name: str) -> bool:
    """Whether a draft is an MTP layer, that of the target or that of a folder.

    Raises:
        InvalidParameterError: it is a folder with a quantisation.
    """
    return names_mtp(name) or find_mtp(name) is not None


def no_mtp(target: str) -> UnsupportedModelError:
    """The error for a target without an MTP layer that can be read.

    Args:
        target: the user's name for the target.
    """
    return UnsupportedModelError(
        "draft",
        f"{MTP_METHOD!r} drafts with an MTP layer of the target: {_what_it_has(target)}, or they "
        f"cannot be read from its files; {INSTEAD}",
    )


def check_mtp(target: str, drafts: Iterable[str], method: str | None) -> None:
    """Refuse the MTP layer of a target that has none, before the target is loaded.

    Args:
        target: the user's name for the target.
        drafts: the names of the drafts.
        method: the kind of draft that the user named, if any.

    Raises:
        UnsupportedModelError: such drafts are wanted, and the target has no MTP layer, or drafts
            of another kind are named.
        ModelNotFoundError: such drafts are wanted, and there is no such target.
    """
    names = list(drafts)
    if method == MTP_METHOD and not any(map(drafts_with_mtp, names)):
        raise UnsupportedModelError(
            "draft", f"the method is {MTP_METHOD!r}, whose draft is {MTP_METHOD!r}; got {names}"
        )
    if any(map(names_mtp, names)) and " has none" in _what_it_has(target):
        raise no_mtp(target)


def _what_it_has(target: str) -> str:
    """A clause about a target's MTP layers."""
    plain = split_name(target)[0]
    if is_gguf(plain):
        file = GgufFile(find_gguf(plain, "target"), "target")
        return f"{target!r} has {num_mtp_layers(file) or 'none'}"
    folder = _folder(plain)
    if folder is None:
        return f"it is not known whether {target!r} has any"
    count = _count(folder / _CONFIG)
    names = [*tensor_names(folder)]
    if any(map(_TENSOR.search, names)):
        return f"{target!r} has {count or 'some'}"
    if not count:
        return f"{target!r} has none"
    missing = ", but its files do not contain them" if names else ""
    return f"the configuration of {target!r} counts {count}{missing}"


def _folder(name: str) -> Path | None:
    """The folder of a target's configuration; ``None`` if it is not found."""
    location = locate_files(name, "target")
    if Path(location).is_dir():
        return Path(location)
    cached = cached_config(location)
    with suppress(Exception):  # depends on the HTTP library that huggingface_hub uses
        cached = cached or Path(hf_hub_download(location, _CONFIG))
    return None if cached is None else cached.parent


def _count(path: Path) -> int:
    """The number of MTP layers according to a configuration."""
    config: Any = None
    with suppress(OSError, ValueError):
        config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, Mapping):
        return 0
    parts = [config, *(config.get(name) for name in _PARTS)]
    counts = [part.get(name) for part in parts if isinstance(part, Mapping) for name in _COUNTS]
    return max((count for count in counts if type(count) is int), default=0)
