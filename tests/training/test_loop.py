"""The training loop: what a run that was ended leaves, and how it goes on."""

import json
import math

import pytest
import torch
from torch import nn

from draftwise.errors import NumericalError
from draftwise.training.loop import Runtime, Trainer
from draftwise.training.optimizers import Optimizers
from draftwise.training.schedule import Schedule


class Task:
    """Moves one parameter to 0; from a given step on, the loss is not a number."""

    def __init__(self, broken_from=math.inf):
        self.model = nn.Linear(1, 1, bias=False)
        self.num_steps = 0
        self._broken_from = broken_from

    def backward(self, progress):
        self.num_steps += 1
        factor = math.nan if self.num_steps > self._broken_from else 1.0
        loss = self.model.weight.square().sum() * factor
        loss.backward()
        return float(loss.detach()), 10

    def state_dict(self):
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state):
        self.num_steps = state["num_steps"]


def trainer(folder, task, **runtime):
    schedule = Schedule(tokens=1000)
    runtime = Runtime(torch.device("cpu"), compile=False, log_seconds=0.0, **runtime)
    optimizers = Optimizers(task.model, lambda name: False, schedule)
    return Trainer(task, optimizers, schedule, folder, runtime, on_record=lambda record: None)


def steps_in(folder):
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_a_gradient_that_is_not_finite_ends_the_run_and_spares_the_weights(tmp_path):
    task = Task(broken_from=4)
    run = trainer(tmp_path, task, checkpoint_seconds=0.0)
    with pytest.raises(NumericalError, match="the last checkpoint is kept"):
        run.run()
    assert torch.isfinite(task.model.weight).all()
    assert trainer(tmp_path, Task()).num_steps == 4
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_records_after_the_checkpoint_are_repeated_once(tmp_path):
    trainer(tmp_path, Task()).run(max_steps=3)
    killed = trainer(tmp_path, Task(broken_from=6))
    with pytest.raises(NumericalError):
        killed.run()
    # The process was killed while it wrote a record.
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 7, "to')
    trainer(tmp_path, Task()).run(max_steps=5)
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8]
