"""``draftwise train eagle3``: trains an EAGLE-3 head for a target."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwise.distillation.card import card
from draftwise.distillation.data import Collected, collect, read_prompts
from draftwise.distillation.documents import load_documents, pack_documents, save_documents
from draftwise.distillation.evaluation import NUM_DRAFTED, HeldOut
from draftwise.distillation.folder import (
    head_tensors,
    speculators_config,
    write_head,
    write_text,
)
from draftwise.distillation.losses import LOSSES
from draftwise.distillation.objective import HeadTask, Readings
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.start import (
    continued_head,
    default_layers,
    embedding_of,
    new_head,
    read_start,
    state_scale,
    trained_parameters,
)
from draftwise.distillation.teacher import Teacher, load_teacher
from draftwise.distillation.vocabulary import choose_draft_tokens, coverage
from draftwise.errors import InvalidParameterError
from draftwise.models.heads import HeadConfig, HeadWeights
from draftwise.models.loading import resolve_device, resolve_dtype
from draftwise.training.loop import Record, Runtime, Trainer
from draftwise.training.optimizers import Optimizers

_CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Reporting:
    """What a run tells its caller, and how often.

    Attributes:
        on_status: called with a description of what is done now.
        on_record: called with each record of the learning curve.
        check: called before each step; see :class:`draftwise.training.loop.Trainer`.
        log_seconds: time between two records of the loss.
        evaluate_seconds: time between two evaluations.
        checkpoint_seconds: time between two checkpoints.
    """

    on_status: Callable[[str], None] = lambda status: None
    on_record: Callable[[Record], None] = lambda record: None
    check: Callable[[], None] | None = None
    log_seconds: float = 15.0
    evaluate_seconds: float = 180.0
    checkpoint_seconds: float = 300.0


@dataclass(frozen=True)
class Machine:
    """Where a run computes.

    Attributes:
        dtype: data type of the target.
        device: device of target and head.
        trust_remote_code: whether to run code that comes with the target.
        answers: folder of earlier answers; ``None`` for the user's cache folder.
    """

    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    answers: Path | None = None


class HeadTraining:
    """A run of ``draftwise train eagle3``.

    Attributes:
        trainer: the training loop.
        head: the head.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        output: Path,
        machine: Machine | None = None,
        reporting: Reporting | None = None,
        resume: bool = False,
    ) -> None:
        """Collect the data, load the target and prepare the head.

        Args:
            settings: settings of the run.
            output: folder of the head, which exists.
            machine: where the run computes.
            reporting: what the run reports.
            resume: whether to go on with the unfinished run of this folder.

        Raises:
            DraftwiseError: a setting, a file, the target or the head to continue is invalid.
        """
        self._settings, self._output = settings, output
        self._machine = machine or Machine()
        self._reporting = reporting or Reporting()
        self._checkpoint = output / _CHECKPOINT
        self._check_output(resume)
        start = None if settings.start_from is None else read_start(settings.start_from)
        collected = self._collect()
        self._reporting.on_status("loading the target for training")
        device = resolve_device(self._machine.device)
        self._teacher = load_teacher(
            settings.target,
            lambda num_layers: self._layers(num_layers, start),
            resolve_dtype(self._machine.dtype, device),
            device,
            self._machine.trust_remote_code,
        )
        self._target_ids = self._draft_tokens(collected, start)
        self._coverage = coverage(collected.training, self._target_ids)
        self._num_data_tokens = sum(
            len(each.tokens) - each.num_prompt_tokens for each in collected.training
        )
        rows = pack_documents(collected.training, settings.length)
        held_out = pack_documents(collected.held_out, settings.length)
        self._reporting.on_status("reading held-out answers")
        scale = state_scale(self._teacher, rows)
        weights = None if start is None else start[1]
        if start is None:
            self.head = new_head(self._teacher, self._target_ids, scale, settings.seed)
        else:
            config, stored = start
            self.head = continued_head(config, stored, scale).to(device)
        embedding = embedding_of(self._teacher, weights)
        self._own_embedding = None if weights is None else weights.tensors.get(_EMBEDDING)
        self._held_out = HeldOut(self._teacher, held_out, self._target_ids, embedding)
        schedule = settings.schedule(collected.seconds)
        self._task = HeadTask(
            self.head,
            self._teacher,
            rows,
            self._target_ids,
            schedule,
            LOSSES[settings.loss],
            settings.num_steps,
            Readings(self._teacher, rows, round(settings.state_gib * 2**30)),
            embedding,
            settings.seed,
        )
        reporting_settings = self._reporting
        self.trainer = Trainer(
            self._task,
            Optimizers(self.head, _is_matrix, schedule),
            schedule,
            self._checkpoint,
            Runtime(
                device,
                compile=False,
                checkpoint_seconds=reporting_settings.checkpoint_seconds,
                log_seconds=reporting_settings.log_seconds,
                evaluate_seconds=reporting_settings.evaluate_seconds,
            ),
            evaluate=self.evaluate,
            on_record=reporting_settings.on_record,
            check=reporting_settings.check,
        )

    @property
    def facts(self) -> dict[str, Any]:
        """What the run trains, for display and for ``training.json``."""
        settings, trainer = self._settings, self.trainer
        return {
            "target": settings.target,
            "prompts": list(settings.prompts),
            "texts": list(settings.texts),
            "layers": list(self._teacher.layers),
            "num_parameters": trained_parameters(self.head),
            "draft_vocab": len(self._target_ids),
            "target_vocab": self._teacher.vocab_size,
            "coverage": self._coverage,
            "num_data_tokens": self._num_data_tokens,
            "num_unrolled": settings.num_steps,
            "loss": settings.loss,
            "num_tokens": trainer.num_tokens,
            "num_steps": trainer.num_steps,
            "epochs": self._task.stream.epochs,
            "minutes": trainer.elapsed_seconds / 60,
            "machine": f"{self._teacher.device.type}, {torch.get_num_threads()} threads",
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }

    def evaluate(self) -> Mapping[str, float]:
        """Acceptance on the held-out answers. The folder is written too."""
        values = self._held_out.acceptance(self.head)
        self._write(values)
        return values

    def run(self, max_steps: int | None = None) -> dict[str, float]:
        """Train to the end of the schedule, or for ``max_steps`` steps, and write the folder.

        Returns:
            Acceptance on the held-out answers.

        Raises:
            KeyboardInterrupt: the run was interrupted; it can be resumed.
        """
        self.trainer.run(max_steps)
        values = self._held_out.acceptance(self.head)
        self.trainer.log(values)
        self._write(values)
        if self.trainer.progress >= 1.0:
            shutil.rmtree(self._checkpoint)
        return values

    def _check_output(self, resume: bool) -> None:
        settings = self._checkpoint / "settings.json"
        if resume:
            if not settings.exists():
                raise InvalidParameterError(
                    "resume", f"{str(self._output)!r} contains no unfinished run"
                )
            self._settings.check_same(settings)
            return
        if settings.exists():
            raise InvalidParameterError(
                "output",
                f"{str(self._output)!r} contains an unfinished run; resume it, or name another "
                "folder",
            )
        if (self._output / "config.json").exists():
            raise InvalidParameterError(
                "output", f"{str(self._output)!r} contains a model already; name another folder"
            )

    def _collect(self) -> Collected:
        """The documents of the run, or those of the unfinished run that is resumed."""
        folder = self._checkpoint
        facts = folder / "data.json"
        if facts.exists():
            stored = json.loads(facts.read_text(encoding="utf-8"))
            parts = [load_documents(folder / f"{name}.npz") for name in ("training", "held_out")]
            end_tokens = frozenset(stored["end_tokens"])
            return Collected(parts[0], parts[1], end_tokens, stored["seconds"])
        machine = self._machine
        prompts = read_prompts(self._settings)
        collected = collect(
            self._settings,
            prompts,
            machine.dtype,
            machine.device,
            machine.trust_remote_code,
            machine.answers,
            self._reporting.on_status,
        )
        folder.mkdir(exist_ok=True)
        save_documents(folder / "training.npz", collected.training)
        save_documents(folder / "held_out.npz", collected.held_out)
        self._settings.save(folder / "settings.json")
        stored = {"seconds": collected.seconds, "end_tokens": sorted(collected.end_tokens)}
        write_text(facts, json.dumps(stored) + "\n")
        return collected

    def _layers(
        self, num_layers: int, start: tuple[HeadConfig, HeadWeights] | None
    ) -> tuple[int, ...]:
        if start is not None:
            return start[0].states_of(num_layers)
        return self._settings.layers or default_layers(num_layers)

    def _draft_tokens(
        self, collected: Collected, start: tuple[HeadConfig, HeadWeights] | None
    ) -> Tensor:
        teacher: Teacher = self._teacher
        if start is not None:
            config, weights = start
            config.check_target(teacher.hidden_size, teacher.vocab_size, teacher.num_layers)
            return weights.target_ids
        return choose_draft_tokens(
            collected.training, self._settings.draft_vocab, teacher.vocab_size, collected.end_tokens
        )

    def _write(self, evaluation: Mapping[str, float]) -> None:
        """Write the head, its card and the learning curve."""
        teacher, head = self._teacher, self.head
        weights = head.weights()
        if self._own_embedding is not None:
            weights[_EMBEDDING] = self._own_embedding
        config = speculators_config(
            head.config,
            self._settings.target,
            list(getattr(teacher.config, "architectures", None) or []),
            NUM_DRAFTED,
        )
        write_head(
            self._output, config, head_tensors(weights, self._target_ids, teacher.vocab_size)
        )
        facts = self.facts
        log = self._checkpoint / "log.jsonl"
        curve = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        training = {
            "run": facts,
            "settings": asdict(self._settings),
            "evaluation": dict(evaluation),
            "curve": [json.loads(line) for line in curve],
        }
        write_text(self._output / "training.json", json.dumps(training, indent=1) + "\n")
        text = card(self._output, facts, evaluation, NUM_DRAFTED)
        write_text(self._output / "README.md", text)


_EMBEDDING = "embed_tokens.weight"


def _is_matrix(name: str) -> bool:
    """Whether Muon trains a parameter: all matrices but the projection to the vocabulary."""
    return not name.startswith("lm_head")
