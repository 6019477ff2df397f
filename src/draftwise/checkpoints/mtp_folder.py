"""The folder of an MTP layer that was trained for a target: its settings and its tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftwise.checkpoints.draft_folder import CONFIG, TYPE_KEY, WEIGHTS, find_draft, write_draft
from draftwise.checkpoints.lfs import refuse_lfs_pointer
from draftwise.checkpoints.source import split_name
from draftwise.core.formats import MTP_METHOD
from draftwise.errors import InvalidParameterError, ModelNotFoundError, UnsupportedModelError
from draftwise.values import shown

_ROLE = "draft"


@dataclass(frozen=True)
class MtpTarget:
    """What the folder says of its target, beside ``"draftwise_model_type": "mtp"``.

    Attributes:
        target_model_type: transformers' name of the target's architecture.
        num_hidden_layers: number of the target's layers, without the MTP layer.
        hidden_size: size of the target's residual stream.
        vocab_size: number of the target's tokens.
    """

    target_model_type: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, text: Any) -> MtpTarget:
        """What a target's configuration, or that of its text part, says."""
        return cls(text.model_type, text.num_hidden_layers, text.hidden_size, text.vocab_size)


def find_mtp(name: str) -> Path | None:
    """The folder of an MTP layer; ``None`` if the name is that of something else.

    Args:
        name: the name of a draft, with or without a quantisation.

    Raises:
        InvalidParameterError: it is one with a quantisation.
    """
    plain, quantization = split_name(name)
    folder = find_draft(plain, MTP_METHOD)
    if folder is not None and quantization is not None:
        raise InvalidParameterError(_ROLE, f"{plain!r} is an MTP layer, which is not quantised")
    return folder


def write_mtp(folder: Path, target: MtpTarget, tensors: Mapping[str, Tensor]) -> None:
    """Write an MTP layer. Each file is replaced atomically.

    Args:
        folder: the folder.
        target: what the layer was trained for.
        tensors: its tensors by the names that they have in checkpoints of the target's family.
    """
    write_draft(folder, {TYPE_KEY: MTP_METHOD, **asdict(target)}, tensors)


def check_mtp_folder(folder: Path, target: MtpTarget) -> None:
    """Refuse an MTP layer that does not fit a target.

    Raises:
        UnsupportedModelError: it was trained for another target.
        ModelNotFoundError: there are no weights, or a pointer of Git LFS in their place.
    """
    found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for name, expected in asdict(target).items():
        if found.get(name) != expected:
            raise UnsupportedModelError(
                _ROLE,
                f"the MTP layer in {str(folder)!r} was trained for a target with {name} "
                f"{shown(found.get(name))}, and this one has {shown(expected)}",
            )
    if not (folder / WEIGHTS).is_file():
        raise ModelNotFoundError(_ROLE, f"the folder {str(folder)!r} has no {WEIGHTS}")
    refuse_lfs_pointer(folder / WEIGHTS, _ROLE)
