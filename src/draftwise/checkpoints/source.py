"""Where a model comes from: a bundled model, a folder, a GGUF file or the hub, by its name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwise import zoo
from draftwise.checkpoints.adapters import hub_adapter, refuse_adapter
from draftwise.checkpoints.gguf import GgufFile, find_gguf, is_gguf
from draftwise.checkpoints.hub import find_on_hub
from draftwise.checkpoints.lfs import refuse_lfs_pointers
from draftwise.checkpoints.other_drafts import refuse_other_draft_in
from draftwise.checkpoints.support import ATTENTION_NAME
from draftwise.core.formats import QUANTIZATIONS
from draftwise.errors import (
    InvalidParameterError,
    ModelNotFoundError,
    UnsupportedModelError,
)

# What transformers says of a configuration that no causal language model belongs to.
_OTHER_CLASS = re.compile(r"Unrecognized configuration class <class '[\w.]*?(\w+?)(?:Config)?'>")


def loaded_name(name: str, quantization: str | None) -> str:
    """The name of a loaded model: the user's name and the quantisation."""
    return name if quantization is None else f"{name}:{quantization}"


def split_name(name: str) -> tuple[str, str | None]:
    """Split a name into model and quantisation: the inverse of :func:`loaded_name`."""
    plain, _, last = name.rpartition(":")
    return (plain, last) if plain and last in QUANTIZATIONS else (name, None)


def locate(name: str, role: str) -> str:
    """Resolve a model's name to what ``transformers`` can load: a folder or a hub id.

    Raises:
        ModelNotFoundError: the folder does not exist or contains no model, or pointers of Git LFS
            in place of its files.
        UnsupportedModelError: the folder contains an adapter, or a draft of a kind that Draftwise
            does not run.
        InvalidParameterError: a bundled model cannot have the given size, or its cache cannot be
            written.
    """
    if name.startswith(zoo.PREFIX):
        try:
            return str(zoo.resolve(name))
        except (ModelNotFoundError, InvalidParameterError) as error:
            raise type(error)(role, error.message) from error
    path = Path(name).expanduser()
    if path.is_dir():
        refuse_adapter(path, name, role)
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(role, f"the folder {name!r} has no config.json")
        refuse_other_draft_in(path, name, role)
        refuse_lfs_pointers(path, role)
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(role, f"there is no folder {name!r}")
    return name


def locate_files(name: str, role: str) -> str:
    """As :func:`locate`. If the hub cannot be reached, the folder of its model in the local cache.

    Raises:
        ModelNotFoundError: as :func:`locate`, or the hub cannot be reached and the model is not in
            the local cache.
        UnsupportedModelError, InvalidParameterError: as :func:`locate`.
    """
    location = locate(name, role)
    return location if Path(location).is_dir() else find_on_hub(location, role)


@dataclass(frozen=True)
class Source:
    """Where ``transformers`` loads a model from.

    Attributes:
        name: the user's name for the model.
        role: the model's role; named in errors.
        location: a folder, a hub id, or a GGUF file.
        options: keyword arguments of every ``from_pretrained``.
        gguf: the GGUF file that contains the model, or ``None``.
    """

    name: str
    role: str
    location: str
    options: dict[str, Any]
    gguf: GgufFile | None

    def error(self, error: Exception) -> ModelNotFoundError | UnsupportedModelError:
        """The error for an exception of ``transformers``."""
        text = str(error).strip().splitlines()
        reason = text[0] if text else type(error).__name__
        if "trust_remote_code" in str(error):
            return UnsupportedModelError(
                self.role,
                f"{self.name!r} contains custom code; if you trust it, set trust_remote_code",
            )
        other_class = _OTHER_CLASS.search(str(error))
        if other_class is not None:
            return UnsupportedModelError(
                self.role,
                f"{self.name!r} is a {other_class[1]} model, for which transformers has no causal "
                "language model",
            )
        if ATTENTION_NAME in str(error):
            return UnsupportedModelError(
                self.role, f"{self.name!r} does not support custom attention functions"
            )
        if isinstance(error, OSError):
            # Only the hub's models may still lack a configuration here.
            adapter = hub_adapter(self.name, self.role) if "config.json" in str(error) else None
            if adapter is not None:
                return adapter
            return ModelNotFoundError(
                self.role,
                f"cannot load {self.name!r} as a folder or hub model with safetensors weights: "
                f"{reason}; bundled models are "
                + ", ".join(zoo.PREFIX + known for known in zoo.names()),
            )
        return UnsupportedModelError(
            self.role, f"{self.name!r} cannot be loaded as a causal language model: {reason}"
        )


def find_source(name: str, role: str, trust_remote_code: bool) -> Source:
    """Resolve a model's name to what ``transformers`` can load.

    Raises:
        ModelNotFoundError: there is no such file, folder or hub model.
        UnsupportedModelError: a GGUF file is damaged.
        InvalidParameterError: the packages that read GGUF files are not installed.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if is_gguf(name):
        return Source(name, role, name, options, GgufFile(find_gguf(name, role), role))
    return Source(name, role, locate_files(name, role), options, None)
