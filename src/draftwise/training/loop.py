"""A training loop that can be interrupted at any step and resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from draftwise.training.clock import StepClock
from draftwise.training.optimizers import Optimizers
from draftwise.training.schedule import Schedule


@dataclass(frozen=True)
class Runtime:
    """Execution settings of a run, which change its result by rounding only.

    Attributes:
        device: device that computes.
        compile: whether to use ``torch.compile``.
        checkpoint_seconds: time between two checkpoints.
        log_seconds: time between two records of the loss.
        evaluate_seconds: time between two evaluations.
    """

    device: torch.device
    compile: bool = True
    checkpoint_seconds: float = 300.0
    log_seconds: float = 30.0
    evaluate_seconds: float = 600.0


class Task(Protocol):
    """What is trained, and on what."""

    @property
    def model(self) -> nn.Module:
        """The module whose parameters are trained."""

    def backward(self, progress: float) -> tuple[float, int]:
        """Add the gradients of one optimiser step to the parameters.

        Args:
            progress: completed fraction of the run, 0 … 1.

        Returns:
            The mean loss and the number of tokens.
        """

    def state_dict(self) -> dict[str, Any]:
        """Position in the data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position returned by :meth:`state_dict`."""


Record = dict[str, float]


class Trainer:
    """Trains a model along a :class:`Schedule`, with checkpoints in ``folder``.

    If the folder has a checkpoint, training resumes from it, and ends with the same weights as
    without an interruption.

    Attributes:
        task: what is trained.
        schedule: the run's schedule.
        folder: folder of the checkpoint and of ``log.jsonl``.
        num_steps: completed optimiser steps.
        num_tokens: tokens of these steps.
        elapsed_seconds: training time, without evaluations and pauses.
    """

    def __init__(
        self,
        task: Task,
        optimizers: Optimizers,
        schedule: Schedule,
        folder: Path,
        runtime: Runtime,
        *,
        evaluate: Callable[[], Mapping[str, float]] | None = None,
        on_record: Callable[[Record], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Create the trainer and restore the folder's checkpoint, if there is one.

        Args:
            task: what is trained.
            optimizers: optimisers of the task's model.
            schedule: the run's schedule.
            folder: created if it does not exist.
            runtime: execution settings.
            evaluate: called every ``runtime.evaluate_seconds``.
            on_record: called with each line of the log; ``None`` prints it as JSON.
            check: called before each step. A ``KeyboardInterrupt`` that it raises ends the run
                after a checkpoint.
        """
        self.task = task
        self.schedule = schedule
        self.folder = folder
        self.runtime = runtime
        self.num_steps = 0
        self.num_tokens = 0
        self.elapsed_seconds = 0.0
        self._optimizers = optimizers
        self._evaluate = evaluate
        self._on_record = on_record or _print
        self._check = check
        folder.mkdir(parents=True, exist_ok=True)
        self._restore()

    @property
    def progress(self) -> float:
        """Completed fraction of the schedule, 0 … 1."""
        return self.schedule.progress(self.num_tokens, self.elapsed_seconds)

    def run(self, max_steps: int | None = None) -> None:
        """Train until the schedule ends, or for at most ``max_steps`` further steps.

        Raises:
            KeyboardInterrupt: ``check`` raised it; the state is saved.
            NumericalError: a gradient is not finite; the last checkpoint is kept.
        """
        clock = StepClock()
        last_log = last_save = last_evaluation = time.monotonic()
        losses: list[float] = []
        seconds, tokens = 0.0, 0
        while self.progress < 1.0 and max_steps != 0:
            self._check_interruption()
            clock.start()
            loss, num_tokens = self._step()
            spent = clock.stop()
            losses.append(loss)
            self.elapsed_seconds += spent
            seconds, tokens = seconds + spent, tokens + num_tokens
            max_steps = None if max_steps is None else max_steps - 1
            now = time.monotonic()
            if now - last_log >= self.runtime.log_seconds:
                mean = sum(losses) / len(losses)
                self.log({"loss": mean, "tokens_per_second": tokens / max(seconds, 1e-9)})
                losses, seconds, tokens, last_log = [], 0.0, 0, now
            if now - last_save >= self.runtime.checkpoint_seconds:
                self.save()
                last_save = now
            if self._evaluate and now - last_evaluation >= self.runtime.evaluate_seconds:
                self.log(dict(self._evaluate()))
                last_evaluation = time.monotonic()
        self.save()

    def save(self) -> None:
        """Write a checkpoint, replacing the previous one atomically."""
        temporary = self.folder / "checkpoint.tmp"
        state = {
            "model": self.task.model.state_dict(),
            "optimizers": self._optimizers.state_dict(),
            "data": self.task.state_dict(),
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "elapsed_seconds": self.elapsed_seconds,
        }
        torch.save(state, temporary)
        temporary.replace(self.folder / "checkpoint.pt")

    def _check_interruption(self) -> None:
        try:
            if self._check is not None:
                self._check()
        except KeyboardInterrupt:
            self.save()
            raise

    def _restore(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.runtime.device, weights_only=True)
        self.task.model.load_state_dict(state["model"])
        self._optimizers.load_state_dict(state["optimizers"])
        self.task.load_state_dict(state["data"])
        self.num_steps = state["num_steps"]
        self.num_tokens = state["num_tokens"]
        self.elapsed_seconds = state["elapsed_seconds"]
        self._forget_later_records()

    def _forget_later_records(self) -> None:
        """Delete records of steps after the checkpoint, which are repeated, from the log."""
        path = self.folder / "log.jsonl"
        if not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the line was cut off
            if record["step"] <= self.num_steps:
                kept.append(line + "\n")
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(path)

    def _step(self) -> tuple[float, int]:
        progress = self.progress
        loss, num_tokens = self.task.backward(progress)
        self._optimizers.step(progress)
        self.num_steps += 1
        self.num_tokens += num_tokens
        return loss, num_tokens

    def log(self, values: Mapping[str, float]) -> None:
        """Append a record to the log, with the place of the run."""
        record: Record = {
            "step": self.num_steps,
            "tokens": self.num_tokens,
            "minutes": round(self.elapsed_seconds / 60, 2),
            "progress": round(self.progress, 4),
            **{name: round(value, 4) for name, value in values.items()},
        }
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
        self._on_record(record)


def _print(record: Record) -> None:
    print(json.dumps(record), flush=True)
