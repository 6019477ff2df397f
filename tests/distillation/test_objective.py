"""The training objective, its losses and the measured acceptance."""

import math
from functools import partial

import pytest
import torch

from draftwise.distillation.chain_task import STEP_DECAY
from draftwise.distillation.documents import (
    Document,
    choose_draft_tokens,
    coverage,
    pack_documents,
)
from draftwise.distillation.eagle3 import HeadTask, chain_logits_of_head
from draftwise.distillation.evaluation import NUM_DRAFTED, HeldOut
from draftwise.distillation.model import ModelTask, chain_logits_of_model, model_config
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.start import new_head
from draftwise.training import losses
from draftwise.training.llama import new_llama
from draftwise.training.losses import LOSSES, mean_loss
from draftwise.training.optimizers import Optimizers
from draftwise.training.schedule import Schedule

from .conftest import LENGTH, outputs_everywhere, random_documents, randomised_head, tiny_teacher

TARGET_IDS = torch.arange(0, 24, 2)


def task_of(
    teacher, head, rows, target_ids=TARGET_IDS, loss="cross-entropy", steps=3, batch_rows=4
):
    schedule = Schedule(
        tokens=10**6, batch_tokens=batch_rows * LENGTH, micro_batch_tokens=2 * LENGTH
    )
    settings = TrainingSettings(
        "eagle3", "target", ("prompts",), tokens=1, loss=loss, num_steps=steps
    )
    return HeadTask(head, teacher, rows, target_ids, schedule, settings, teacher.embedding)


def test_batches_that_passes_do_not_divide_are_read_in_full(models):
    """The gradient of three rows, of which two fit into a pass."""
    teacher = tiny_teacher(models)
    head = randomised_head(teacher, TARGET_IDS)
    rows = pack_documents(random_documents(12), LENGTH)
    task = task_of(teacher, head, rows, batch_rows=3)
    indices = task.stream.next(3)
    task.load_state_dict({"count": 0})
    loss, num_tokens = task.backward(0.0)
    assert num_tokens == rows.take(indices, teacher.device).num_tokens
    assert task.state_dict() == {"count": 3}
    parts = [rows.take(part, teacher.device) for part in (indices[:2], indices[2:])]
    with torch.no_grad():
        two, one = (task.loss(part, teacher.read(part)).item() for part in parts)
    assert loss == pytest.approx((2 * two + one) / 3, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_by_their_definitions(name, monkeypatch):
    torch.manual_seed(0)
    logits, p = torch.randn(3, 7), torch.randn(3, 7).softmax(-1)
    q = logits.softmax(-1)
    cross = -(p * q.log()).sum(-1)
    variation = 1 - torch.minimum(p, q).sum(-1)
    expected = {
        "cross-entropy": cross,
        "kl": (p * (p / q).log()).sum(-1),
        "total-variation": variation,
        "mixed": (cross + variation) / 2,
    }[name]
    torch.testing.assert_close(LOSSES[name](logits, p)[0], expected)
    # Of a batch in parts, with the gradient that automatic differentiation gives.
    monkeypatch.setitem(losses._PART_BYTES, "cpu", 4 * 7 * 2)
    places = torch.tensor([2, 0, 0, 1, 2])
    x = torch.randn(5, 7, requires_grad=True)
    log_q, labels = x.log_softmax(-1), p[places]
    cross = -(labels * log_q).sum(-1)
    variation = (labels - log_q.exp()).abs().sum(-1) / 2
    expected = {
        "cross-entropy": cross,
        "kl": (labels * (labels.log() - log_q)).sum(-1),
        "total-variation": variation,
        "mixed": (cross + variation) / 2,
    }[name].mean()
    found = mean_loss(LOSSES[name], x, p, places)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(3 * each, x)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_the_loss_counts_what_a_draft_could_propose(models):
    """Computed position by position from the definition."""
    teacher = tiny_teacher(models)
    head = randomised_head(teacher, TARGET_IDS)
    documents = random_documents(5)
    rows = pack_documents(documents, LENGTH)
    reading = teacher.read(rows)
    with torch.no_grad():
        loss = task_of(teacher, head, rows).loss(rows, reading)
        outs = outputs_everywhere(head, rows, reading.states, teacher.embedding, 3)
        p = teacher.logits(reading.final.flatten(0, 1), TARGET_IDS).softmax(-1)
        p = p.view(*rows.tokens.shape, -1)
    total = 0.0
    for depth, out in enumerate(outs):
        values = []
        q = head.logits(out).log_softmax(-1)
        for number, document in enumerate(documents):
            row, start = (rows.documents == number).nonzero()[0].tolist()
            for t in range(len(document.tokens) - 2 - depth):
                drafted = range(t + 2, t + 3 + depth)
                is_learned = all(
                    i >= document.num_prompt_tokens and document.tokens[i] in TARGET_IDS
                    for i in drafted
                )
                if is_learned:
                    label = p[row, start + t + 1 + depth]
                    values.append(-(label * q[row, start + t]).sum().item())
        total += STEP_DECAY**depth * sum(values) / len(values)
    expected = total / sum(STEP_DECAY**depth for depth in range(3))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_rows_without_anything_to_learn(models):
    teacher = tiny_teacher(models)
    head = randomised_head(teacher, TARGET_IDS)
    rows = pack_documents([Document(tuple(range(10)), 10)], LENGTH)
    assert task_of(teacher, head, rows).backward(0.0) == (0.0, 4 * 10)


def test_training_lowers_the_loss_and_raises_the_acceptance(models):
    """With the default loss; the gradients of all are those of their definitions."""
    teacher = tiny_teacher(models)
    documents = random_documents(24)
    rows = pack_documents(documents, LENGTH)
    ids = torch.arange(24)
    head = new_head(teacher, ids, teacher.state_scale(rows), 0)
    task = task_of(teacher, head, rows, ids, "mixed")
    held_out = HeldOut(teacher, rows)
    chains = partial(chain_logits_of_head, head, teacher.embedding)
    schedule = Schedule(
        tokens=100, muon_learning_rate=0.01, adamw_learning_rate=0.01, decay_fraction=0.5
    )
    optimizers = Optimizers(head, lambda name: not name.startswith("lm_head"), schedule)
    before = held_out.acceptance(chains, torch.arange(24))
    values = []
    for step in range(40):
        values.append(task.backward(step / 40)[0])
        optimizers.step(step / 40)
    after = held_out.acceptance(chains, torch.arange(24))
    assert sum(values[-4:]) < 0.9 * sum(values[:4])
    assert after["accepted_length/T=1"] > before["accepted_length/T=1"] + 0.2


def test_acceptance_by_its_definition(models):
    """Of a sampled answer Σ min(p, q), and of a greedy one whether the best tokens are equal."""
    teacher = tiny_teacher(models)
    head = randomised_head(teacher, TARGET_IDS)
    documents = [
        *random_documents(3, seed=1, temperature=0.5),
        *random_documents(3, seed=2, temperature=0.0),
    ]
    rows = pack_documents(documents, LENGTH)
    chains = partial(chain_logits_of_head, head, teacher.embedding)
    values = HeldOut(teacher, rows).acceptance(chains, TARGET_IDS)
    lengths = {0.5: [], 0.0: []}
    for document in documents:
        own = pack_documents([document], LENGTH)
        reading = teacher.read(own)
        logits = teacher.logits(reading.final[0])
        with torch.no_grad():
            outs = outputs_everywhere(head, own, reading.states, teacher.embedding, NUM_DRAFTED)
        for t in range(document.num_prompt_tokens, len(document.tokens) - NUM_DRAFTED):
            survived, length = 1.0, 1.0
            for depth, out in enumerate(outs):
                label, q = logits[t + 1 + depth], head.logits(out[0, t])
                if document.temperature:
                    p = (label / 0.5).softmax(-1)[TARGET_IDS]
                    survived *= torch.minimum(p, (q / 0.5).softmax(-1)).sum().item()
                else:
                    survived *= float(TARGET_IDS[q.argmax()] == label.argmax())
                length += survived
            lengths[document.temperature].append(length)
    for temperature, each in lengths.items():
        mean = sum(each) / len(each)
        assert values[f"accepted_length/T={temperature:g}"] == pytest.approx(mean, abs=1e-4)


def test_the_most_frequent_tokens_of_answers_are_chosen():
    documents = [Document((9, 9, 9, 1, 1, 2), 3), Document((5, 1, 3, 3), 1)]
    chosen = choose_draft_tokens(documents, 4, 20, always=[17])
    assert chosen.tolist() == [1, 2, 3, 17]
    # Then tokens of prompts, then the lowest ids.
    assert choose_draft_tokens(documents, 7, 20, [17]).tolist() == [0, 1, 2, 3, 5, 9, 17]
    assert choose_draft_tokens(documents, 50, 20).tolist() == list(range(20))
    assert coverage(documents, torch.tensor([1, 3])) == pytest.approx(5 / 6)
    assert math.isclose(coverage(documents, chosen), 1.0)


def test_a_model_learns_the_targets_distribution(models):
    """Its loss by the definition, and its training."""
    teacher = tiny_teacher(models, ())
    documents = random_documents(12)
    rows = pack_documents(documents, LENGTH)
    settings = TrainingSettings(
        "model", "target", ("prompts",), tokens=1, num_layers=1, hidden_size=64
    )
    model = new_llama(model_config(settings, teacher, frozenset()), 0)
    schedule = Schedule(tokens=100, batch_tokens=4 * LENGTH, decay_fraction=0.5)
    task = ModelTask(model, teacher, rows, schedule, LOSSES["kl"], 0)
    values = []
    with torch.no_grad():
        for document in documents:
            ids = torch.tensor([document.tokens])
            places = slice(document.num_prompt_tokens - 1, len(document.tokens) - 1)
            p = teacher._model(input_ids=ids).logits[0, places].log_softmax(-1)
            q = model(input_ids=ids).logits[0, places].log_softmax(-1)
            values += (p.exp() * (p - q)).sum(-1).tolist()
        assert task.loss_of(range(len(rows)), rows).item() == pytest.approx(
            sum(values) / len(values), rel=1e-4
        )
    held_out = HeldOut(teacher, rows)
    chains = partial(chain_logits_of_model, model)
    before = held_out.acceptance(chains, torch.arange(24))["accepted_length/T=1"]
    optimizers = Optimizers(model, lambda name: ".layers." in name, schedule)
    for step in range(40):
        task.backward(step / 40)
        optimizers.step(step / 40)
    assert held_out.acceptance(chains, torch.arange(24))["accepted_length/T=1"] > before + 0.2


def test_new_heads_are_unsure(models):
    """Also where the target's final norm has large weights."""
    teacher = tiny_teacher(models)
    rows = pack_documents(random_documents(), LENGTH)
    scale = teacher.state_scale(rows)
    with torch.no_grad():
        teacher._model.base_model.norm.weight.mul_(50)
    head = new_head(teacher, TARGET_IDS, scale, 0)
    outs = torch.randn(1000, teacher.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert 1.5 < head.logits(outs).std().item() < 2.5
