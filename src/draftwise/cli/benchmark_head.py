"""A head that ``draftwise benchmark`` trains for its target before it measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from draftwise.cli.defaults import ChosenModels
from draftwise.cli.train_options import CommonOptions
from draftwise.errors import DraftwiseError

# Written at the end of a training.
_RECORD = "training.json"
# Options of this command, by those of `draftwise train`.
_OPTIONS = {"prompts": "train_on", "minutes": "train_minutes"}


def with_trained_head(
    models: ChosenModels,
    prompts: Sequence[Path],
    minutes: float,
    output: Path,
    options: Mapping[str, Any],
) -> ChosenModels:
    """Train an EAGLE-3 head in the folder ``head`` of the report, and add it to the drafts.

    A head that an earlier run of the command finished is used as it is. An unfinished one is
    trained further.

    Args:
        models: the models of the command.
        prompts: files of prompts to train on.
        minutes: time for answers and training together.
        output: folder of the report.
        options: further values of :class:`~draftwise.cli.train_options.CommonOptions`.

    Raises:
        DraftwiseError: a file of prompts or the target cannot be used.
    """
    from draftwise.distillation.run import is_unfinished

    folder = output / "head"
    if (folder / _RECORD).exists() and not is_unfinished(folder):
        typer.echo(f"using the head in {folder}; delete the folder to train another one", err=True)
    else:
        training = CommonOptions(
            prompts=list(prompts),
            output=folder,
            target=models.target,
            minutes=minutes,
            resume=is_unfinished(folder),
            **options,
        )
        try:
            training.settings("eagle3")
            typer.echo(f"training an EAGLE-3 head of {models.target} in {folder}", err=True)
            training.run("eagle3")
        except DraftwiseError as error:
            error.field = _OPTIONS.get(error.field, error.field)
            raise
    drafts = [models.draft] if models.draft else []
    return replace(models, draft=",".join([*drafts, str(folder)]), draft_is_missing=False)
