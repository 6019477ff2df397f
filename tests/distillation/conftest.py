"""A tiny target and the data that a head is trained on."""

import torch
from transformers import AutoModelForCausalLM

from draftwise.distillation.documents import Document, pack_documents
from draftwise.distillation.start import new_head
from draftwise.distillation.teacher import Teacher
from draftwise.distillation.unrolled import unroll

from ..tiny_models import Recipe

TARGET = Recipe(vocab=24, context=64, seed=3, config={"num_hidden_layers": 3})
LAYERS = (1, 2, 3)
LENGTH = 24


def load_target(models, recipe=TARGET):
    return AutoModelForCausalLM.from_pretrained(models.folder(recipe))


def tiny_teacher(models, layers=LAYERS, recipe=TARGET):
    return Teacher(load_target(models, recipe), layers)


def random_documents(count=6, vocab=24, seed=0, temperature=1.0):
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for index in range(count):
        size = 10 + index % 5
        tokens = torch.randint(0, vocab, (size,), generator=generator).tolist()
        documents.append(Document(tuple(tokens), 2, temperature))
    return documents


def randomised_head(teacher, target_ids, **changes):
    """A new head whose weights are all random, norms and zeroed projections included."""
    rows = pack_documents(random_documents(), LENGTH)
    head = new_head(teacher, target_ids, teacher.state_scale(rows), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    return head


def outputs_everywhere(head, rows, states, embedding, num_steps):
    """``[num_steps, rows, length, hidden]`` outputs of the chains of all positions."""
    begins = torch.ones_like(rows.is_learned)
    outs = unroll(head, rows, states, embedding, begins, num_steps)
    return torch.stack([out.view(*rows.tokens.shape, -1) for out in outs])


def assert_trains_without_its_target(task, target, largest_ratio):
    """Some steps lower the loss of a task, and change no weight of the target.

    Args:
        task: the task.
        target: the target's module.
        largest_ratio: of the last losses to the first.
    """
    before = {name: each.clone() for name, each in target.state_dict().items()}
    optimizer = torch.optim.Adam(task.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss, num_tokens = task.backward(0.0)
        optimizer.step()
        losses.append(loss)
        assert num_tokens > 0
    assert sum(losses[-10:]) < largest_ratio * sum(losses[:10])
    after = target.state_dict()
    assert all(torch.equal(each, after[name]) for name, each in before.items())
