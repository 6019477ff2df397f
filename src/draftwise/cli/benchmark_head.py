"""A head that ``draftwise benchmark`` trains for its target before it measures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from draftwise.cli.defaults import ChosenModels
from draftwise.cli.train_options import CommonOptions
from draftwise.errors import DraftwiseError, InvalidParameterError

_SUFFIX = "suffix"
_FOLDER = "head"
# Written at the end of a training.
_RECORD = "training.json"
# Options of this command, by those of `draftwise train`.
_OPTIONS = {"prompts": "train_on", "minutes": "train_minutes"}


def with_head(models: ChosenModels, draft: str | None, output: Path) -> ChosenModels:
    """Add the head in the folder of the report to the drafts. It need not exist yet.

    Args:
        models: the models of the command.
        draft: the draft that the user gave, if any. A default draft is replaced by the head.
        output: folder of the report.

    Raises:
        InvalidParameterError: the head cannot draft beside the other models, or the folder has a
            head of another target.
    """
    if draft is not None and models.draft not in (None, _SUFFIX):
        raise InvalidParameterError(
            "draft", f"must be suffix or none beside a head that is trained, got {draft!r}"
        )
    if models.companion is not None and models.companion.startswith("draft:"):
        raise InvalidParameterError(
            "companion", f"{models.companion!r} needs a draft model, and a head is none"
        )
    from draftwise.checkpoints.heads.origin import public_name

    folder = output / _FOLDER
    if is_trained(folder):
        trained = json.loads((folder / _RECORD).read_text(encoding="utf-8"))["run"]["target"]
        # The record has the names of folders without their paths.
        wanted = public_name(models.target)
        if trained != wanted:
            raise InvalidParameterError(
                "output", f"{str(folder)!r} is a head of {trained!r}, not of {wanted!r}"
            )
    beside = [_SUFFIX] if draft is not None and models.draft == _SUFFIX else []
    return replace(models, draft=",".join([*beside, str(folder)]), draft_is_missing=False)


def is_trained(folder: Path) -> bool:
    """Whether a folder contains a head whose training has ended."""
    from draftwise.distillation.run import is_unfinished

    return (folder / _RECORD).exists() and not is_unfinished(folder)


def train_head(
    target: str, prompts: Sequence[Path], minutes: float, output: Path, options: Mapping[str, Any]
) -> None:
    """Train an EAGLE-3 head in the folder of the report, unless an earlier run trained it.

    Args:
        target: name of the target.
        prompts: files of prompts to train on.
        minutes: time for answers and training together.
        output: folder of the report.
        options: further values of :class:`~draftwise.cli.train_options.CommonOptions`.

    Raises:
        DraftwiseError: a file of prompts or the target cannot be used.
    """
    from draftwise.distillation.run import is_unfinished

    folder = output / _FOLDER
    if is_trained(folder):
        typer.echo(f"using the head in {folder}; delete the folder to train another one", err=True)
        return
    training = CommonOptions(
        prompts=tuple(prompts),
        output=folder,
        target=target,
        minutes=minutes,
        resume=is_unfinished(folder),
        **options,
    )
    try:
        training.settings("eagle3")
        typer.echo(f"training an EAGLE-3 head of {target} in {folder}", err=True)
        training.run("eagle3", to_go_on="repeat the command")
    except DraftwiseError as error:
        error.field = _OPTIONS.get(error.field, error.field)
        raise
