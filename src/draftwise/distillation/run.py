"""A training run: data, target, loop, evaluation, and the folder that comes out."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from draftwise.checkpoints.draft_folder import write_text
from draftwise.devices import resolve_device
from draftwise.distillation.block import DFlashRecipe, DSparkRecipe
from draftwise.distillation.card import card
from draftwise.distillation.companion import CompanionRecipe
from draftwise.distillation.data import Collected, collect
from draftwise.distillation.documents import (
    coverage,
    load_documents,
    pack_documents,
    save_documents,
)
from draftwise.distillation.eagle3 import Eagle3Recipe
from draftwise.distillation.evaluation import NUM_DRAFTED, HeldOut
from draftwise.distillation.exit import ExitRecipe
from draftwise.distillation.model import ModelRecipe
from draftwise.distillation.mtp import MtpRecipe
from draftwise.distillation.recipe import Recipe
from draftwise.distillation.settings import Machine, TrainingSettings
from draftwise.distillation.target import check_target
from draftwise.distillation.teacher import load_teacher
from draftwise.errors import InvalidParameterError
from draftwise.models.loading import resolve_dtype
from draftwise.training.loop import Record, Runtime, Trainer
from draftwise.training.optimizers import Optimizers

RECIPES: Mapping[str, type[Recipe]] = MappingProxyType(
    {
        "eagle3": Eagle3Recipe,
        "model": ModelRecipe,
        "companion": CompanionRecipe,
        "exit": ExitRecipe,
        "mtp": MtpRecipe,
        "dflash": DFlashRecipe,
        "dspark": DSparkRecipe,
    }
)

_CHECKPOINT = "checkpoint"
_SETTINGS = "settings.json"
_FACTS = "data.json"


def recipe_of(settings: TrainingSettings, trust_remote_code: bool = False) -> Recipe:
    """Create the recipe of a run.

    Args:
        settings: settings of the run.
        trust_remote_code: whether to run code that comes with the target or a named draft.

    Raises:
        DraftwiseError: a named draft cannot be read.
    """
    return RECIPES[settings.kind](settings, trust_remote_code)


def is_unfinished(output: Path) -> bool:
    """Whether a folder contains an unfinished run, which can be resumed."""
    return (output / _CHECKPOINT / _SETTINGS).exists()


@dataclass(frozen=True)
class Reporting:
    """What a run tells its caller.

    Attributes:
        on_status: called with a description of what is done now.
        on_record: called with each record of the learning curve.
        check: called before each step; see :class:`draftwise.training.loop.Trainer`.
    """

    on_status: Callable[[str], None] = lambda status: None
    on_record: Callable[[Record], None] = lambda record: None
    check: Callable[[], None] | None = None


class TrainingRun:
    """One run of ``draftwise train``.

    Attributes:
        trainer: the training loop.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        recipe: Recipe,
        output: Path,
        machine: Machine | None = None,
        reporting: Reporting | None = None,
        resume: bool = False,
    ) -> None:
        """Collect the data, load the target and prepare the draft.

        Args:
            settings: settings of the run.
            recipe: what is trained, see :func:`recipe_of`.
            output: folder of the draft, which exists.
            machine: where the run computes.
            reporting: what the run reports.
            resume: whether to go on with the unfinished run of this folder.

        Raises:
            DraftwiseError: a setting, a file, the target or the draft to continue is invalid.
        """
        self._settings, self._recipe, self._output = settings, recipe, output
        self._machine = machine or Machine()
        self._reporting = reporting or Reporting()
        self._checkpoint = output / _CHECKPOINT
        self._check_output(resume)
        config = check_target(
            settings.target, recipe.layers, settings.length, self._machine.trust_remote_code
        )
        recipe.check(config)
        if resume:
            collected = self._load()
        else:
            collected = collect(settings, self._machine, self._reporting.on_status)
        self._reporting.on_status("loading the target for training")
        device = resolve_device(self._machine.device)
        self._teacher = load_teacher(
            settings.target,
            recipe.layers,
            resolve_dtype(self._machine.dtype, device),
            device,
            self._machine.trust_remote_code,
        )
        if resume:
            self._check_target()
        schedule = settings.schedule(collected.seconds, device.type)
        rows = pack_documents(collected.training, settings.length)
        self._prepared = prepared = recipe.prepare(self._teacher, collected, rows, schedule)
        self._facts = {
            **prepared.facts,
            "draft_vocab": len(prepared.target_ids),
            "target_vocab": self._teacher.vocab_size,
            "coverage": coverage(collected.training, prepared.target_ids),
            "num_data_tokens": sum(
                len(each.tokens) - each.num_prompt_tokens for each in collected.training
            ),
        }
        self._reporting.on_status("reading held-out answers")
        held_out = pack_documents(collected.held_out, settings.length)
        self._held_out = HeldOut(self._teacher, held_out)
        self.trainer = Trainer(
            prepared.task,
            Optimizers(prepared.task.model, prepared.is_matrix, schedule),
            schedule,
            self._checkpoint,
            Runtime(device, compile=False, log_seconds=15.0, evaluate_seconds=180.0),
            evaluate=self.evaluate,
            on_record=self._reporting.on_record,
            check=self._reporting.check,
        )
        if not resume:
            # A start that failed leaves nothing behind that would block the folder.
            self._save_start(collected)

    @property
    def facts(self) -> dict[str, Any]:
        """What the run trains, for display and for ``training.json``."""
        settings, trainer = self._settings, self.trainer
        return {
            **self._settings.public(),
            "target_fingerprint": self._teacher.fingerprint,
            "loss": settings.loss,
            **self._facts,
            "num_tokens": trainer.num_tokens,
            "num_steps": trainer.num_steps,
            "epochs": self._prepared.task.stream.epochs,
            "minutes": trainer.elapsed_seconds / 60,
            "machine": f"{self._teacher.device.type}, {torch.get_num_threads()} threads",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }

    def evaluate(self) -> Mapping[str, float]:
        """Acceptance, and what else the recipe measures, on the held-out answers.

        The folder is written too.
        """
        values = self._measure()
        self._write(values)
        return values

    def run(self, max_steps: int | None = None) -> Mapping[str, float]:
        """Train to the end of the schedule, or for ``max_steps`` steps, and write the folder.

        Returns:
            What :meth:`evaluate` returns.

        Raises:
            KeyboardInterrupt: the run was interrupted; it can be resumed.
        """
        self.trainer.run(max_steps)
        values = self._measure()
        self.trainer.log(values)
        self._write(values)
        if self.trainer.progress >= 1.0:
            shutil.rmtree(self._checkpoint)
        return values

    def _measure(self) -> dict[str, float]:
        prepared = self._prepared
        acceptance = self._held_out.acceptance(
            prepared.chain_logits, prepared.target_ids, prepared.is_one_hot
        )
        return {**acceptance, **prepared.measure(self._held_out)}

    def _check_output(self, resume: bool) -> None:
        if resume:
            if not is_unfinished(self._output):
                raise InvalidParameterError(
                    "resume", f"{str(self._output)!r} contains no unfinished run"
                )
            self._settings.check_same(self._checkpoint / _SETTINGS)
            return
        if is_unfinished(self._output):
            raise InvalidParameterError(
                "output",
                f"{str(self._output)!r} contains an unfinished run; repeat its command with "
                "resume, or name another folder",
            )
        if (self._output / "config.json").exists():
            raise InvalidParameterError(
                "output", f"{str(self._output)!r} contains a model already; name another folder"
            )

    def _save_start(self, collected: Collected) -> None:
        """Write what the run is resumed from. The settings come last, as they mark it as whole."""
        folder = self._checkpoint
        save_documents(folder / "training.npz", collected.training)
        save_documents(folder / "held_out.npz", collected.held_out)
        stored = {
            "seconds": collected.seconds,
            "end_tokens": sorted(collected.end_tokens),
            "target": self._target_identity(),
        }
        write_text(folder / _FACTS, json.dumps(stored) + "\n")
        self._settings.save(folder / _SETTINGS)

    def _load(self) -> Collected:
        """The documents of the unfinished run that is resumed."""
        folder = self._checkpoint
        stored = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        parts = [load_documents(folder / f"{name}.npz") for name in ("training", "held_out")]
        end_tokens = frozenset(stored["end_tokens"])
        return Collected(parts[0], parts[1], end_tokens, stored["seconds"])

    def _target_identity(self) -> dict[str, str]:
        """What must be the same when the run is resumed."""
        dtype = str(self._teacher.projection.dtype).removeprefix("torch.")
        return {"fingerprint": self._teacher.fingerprint, "dtype": dtype}

    def _check_target(self) -> None:
        """Compare the target with that of the unfinished run.

        Raises:
            InvalidParameterError: it is another one, or has another data type.
        """
        stored = json.loads((self._checkpoint / _FACTS).read_text(encoding="utf-8"))
        for name, value in self._target_identity().items():
            # Runs of older versions do not name it.
            then = stored.get("target", {}).get(name, value)
            if then != value:
                raise InvalidParameterError(
                    "resume",
                    f"the unfinished run has a target with {name} {then}, and this one has {value};"
                    " use the same target and dtype or another output folder",
                )

    def _write(self, evaluation: Mapping[str, float]) -> None:
        """Write the draft, its card and the learning curve."""
        self._prepared.write(self._output)
        facts = self.facts
        log = self._checkpoint / "log.jsonl"
        curve = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        training = {
            "run": facts,
            "settings": self._settings.recorded(),
            "evaluation": dict(evaluation),
            "curve": [json.loads(line) for line in curve],
        }
        write_text(self._output / "training.json", json.dumps(training, indent=1) + "\n")
        text = card(self._recipe.card(facts), facts, evaluation, NUM_DRAFTED)
        write_text(self._output / "README.md", text)
