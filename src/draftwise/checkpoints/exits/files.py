"""The folder of an exit with an adapter: ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftwise.checkpoints.draft_folder import (
    CONFIG,
    TYPE_KEY,
    WEIGHTS,
    find_draft,
    write_draft,
)
from draftwise.checkpoints.exits.names import exit_layers
from draftwise.checkpoints.lfs import refuse_lfs_pointer
from draftwise.checkpoints.source import split_name
from draftwise.errors import ModelNotFoundError, UnsupportedModelError
from draftwise.values import shown

_TYPE = "exit"


@dataclass(frozen=True)
class ExitConfig:
    """Contents of ``config.json``, beside ``"draftwise_model_type": "exit"``.

    Attributes:
        exit: number of the target's layers before the exit.
        num_hidden_layers: number of the target's layers.
        hidden_size: size of the target's residual stream.
        adapter_rank: rank of the adapter.
        rms_norm_eps: added to the mean square in the adapter's norm.
    """

    exit: int
    num_hidden_layers: int
    hidden_size: int
    adapter_rank: int
    rms_norm_eps: float

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor, by name."""
        return {
            "norm.weight": (self.hidden_size,),
            "down.weight": (self.adapter_rank, self.hidden_size),
            "up.weight": (self.hidden_size, self.adapter_rank),
        }


def find_exit(name: str) -> Path | None:
    """The folder of an exit; ``None`` if the name is that of something else."""
    return find_draft(name, _TYPE)


def names_exit(name: str, role: str) -> bool:
    """Whether a name is that of an exit: ``target:exit=8``, or the folder of one with an adapter.

    Args:
        name: the name of a draft or companion.
        role: ``"draft"`` or ``"companion"``; named in errors.

    Raises:
        InvalidParameterError: the name looks like that of an exit and is none.
    """
    return exit_layers(name, role) is not None or find_exit(split_name(name)[0]) is not None


def read_exit(folder: Path, role: str) -> tuple[ExitConfig, dict[str, Tensor]]:
    """Read an exit and check it.

    Args:
        folder: its folder; see :func:`find_exit`.
        role: ``"draft"`` or ``"companion"``; named in errors.

    Raises:
        ModelNotFoundError: there are no weights, or a pointer of Git LFS in their place.
        UnsupportedModelError: a setting or a tensor is missing, unknown or invalid.
    """
    config = _parse(json.loads((folder / CONFIG).read_text(encoding="utf-8")), role)
    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelNotFoundError(role, f"the folder {str(folder)!r} has no {WEIGHTS}")
    refuse_lfs_pointer(file, role)
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UnsupportedModelError(role, f"{str(file)!r} is damaged: {error}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(shapes.keys() | config.shapes.keys()):
        expected, given = config.shapes.get(name), shapes.get(name)
        if expected != given:
            raise UnsupportedModelError(
                role,
                f"tensor {name!r} of the exit must be {_shown(expected)}, and is {_shown(given)}",
            )
    return config, tensors


def write_exit(folder: Path, config: ExitConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write an exit. Each file is replaced atomically."""
    write_draft(folder, {TYPE_KEY: _TYPE, **asdict(config)}, tensors)


def _parse(found: Mapping[str, Any], role: str) -> ExitConfig:
    values: dict[str, Any] = {}
    for item in fields(ExitConfig):
        value = found.get(item.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_whole = isinstance(value, int) or item.name == "rms_norm_eps"
        if not (is_number and is_whole and 0 < found[item.name] <= sys.float_info.max):
            raise UnsupportedModelError(
                role,
                f"{item.name} in the {CONFIG} of the exit must be a positive finite number, "
                f"got {shown(value)}",
            )
        values[item.name] = value
    return ExitConfig(**values)


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
