"""The adapter of an exit is trained on the target's own distribution."""

import torch

from draftwise.distillation.documents import pack_documents
from draftwise.distillation.exit import ExitTask, TrainedAdapter
from draftwise.models.exits.adapter import ExitAdapter
from draftwise.training.losses import LOSSES
from draftwise.training.schedule import Schedule

from ..engine.exits import exit_logits
from .conftest import (
    LENGTH,
    assert_trains_without_its_target,
    load_target,
    random_documents,
    tiny_teacher,
)

SCHEDULE = Schedule(
    tokens=1000,
    minutes=None,
    batch_tokens=2 * LENGTH,
    micro_batch_tokens=2 * LENGTH,
    length=LENGTH,
    muon_learning_rate=1e-3,
    adamw_learning_rate=1e-3,
    weight_decay=0.0,
)


def randomised(adapter):
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return adapter


def test_a_new_adapter_changes_nothing(models):
    teacher = tiny_teacher(models, (2,))
    rows = pack_documents(random_documents(1), LENGTH)
    reading = teacher.read(rows.take([0], teacher.device))
    logits = teacher.logits_of_stream(TrainedAdapter(16, 4, 1e-6, 3.0)(reading.states))[0]
    tokens = random_documents(1)[0].tokens
    expected = exit_logits(load_target(models), 2, list(tokens))
    torch.testing.assert_close(logits[: len(tokens)], expected, atol=1e-4, rtol=1e-4)


def test_the_folder_computes_what_was_trained():
    trained = randomised(TrainedAdapter(16, 4, 1e-6, 3.0))
    tensors = trained.tensors()
    served = ExitAdapter(
        tensors["norm.weight"], tensors["down.weight"], tensors["up.weight"], 1e-6, torch.float32
    )
    stream = 3 * torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    # The matrices are stored in bfloat16.
    torch.testing.assert_close(served(stream), trained(stream), atol=0.05, rtol=0.02)


def test_training_lowers_the_loss_and_leaves_the_target_alone(models):
    teacher = tiny_teacher(models, (1,))
    rows = pack_documents(random_documents(12), LENGTH)
    adapter = TrainedAdapter(16, 16, 1e-6, 1.0)
    task = ExitTask(adapter, teacher, rows, SCHEDULE, LOSSES["kl"], seed=0)
    assert_trains_without_its_target(task, teacher._model, 0.8)
