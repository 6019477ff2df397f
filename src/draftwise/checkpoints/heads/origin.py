"""The target that a head was trained for, by its name and its fingerprint."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from draftwise.checkpoints.source import split_name
from draftwise.errors import HeadTargetWarning

TRAINING_FILE = "training.json"


def public_name(name: str) -> str:
    """A model's name without the place of a local folder: ``"/home/me/model"`` is ``"model"``."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_dir() else name


def warn_of_other_target(name: str, folder: Path, target: str, fingerprint: str) -> None:
    """Warn of a head that was trained for another target of the same sizes.

    Such a head is lossless, and its tokens are rarely accepted. A quantised target has another
    fingerprint and the same name, and a renamed one the same fingerprint, so either is enough.
    Nothing is known of heads that other tools have trained.

    Args:
        name: the user's name for the head.
        folder: its folder.
        target: name of the target that it is used with.
        fingerprint: that of the target's weights.
    """
    try:
        run = json.loads((folder / TRAINING_FILE).read_text(encoding="utf-8"))["run"]
        trained, trained_fingerprint = run["target"], run["target_fingerprint"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if trained_fingerprint == fingerprint or trained == public_name(split_name(target)[0]):
        return
    warnings.warn(
        f"draft: {name!r} was trained for {trained!r}, and the target {target!r} has another "
        "name and other weights, so few tokens may be accepted; train a head for this target, or "
        "continue this one",
        HeadTargetWarning,
        stacklevel=4,
    )
