"""The training of MTP layers, against passes over whole sequences without a cache."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftwise.distillation.documents import pack_documents
from draftwise.distillation.mtp import MtpTask
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.teacher import Teacher
from draftwise.distillation.unrolled_mtp import follow_chains, unroll_mtp
from draftwise.models.heads.mtp import read_mtp
from draftwise.training.mtp import load_mtp_tensors, mtp_tensors, new_mtp_layer
from draftwise.training.schedule import Schedule

from ..tiny_models import Recipe
from ..tiny_mtp import LAYERS, add_layer
from .conftest import LENGTH, assert_trains_without_its_target, random_documents

NUM_STEPS = 4
SCHEDULE = Schedule(
    tokens=1000, batch_tokens=2 * LENGTH, micro_batch_tokens=2 * LENGTH, length=LENGTH
)
SETTINGS = TrainingSettings(
    kind="mtp", target="target", prompts=("none",), tokens=1, loss="kl", num_steps=3
)
# Without an MTP layer; the last layer has attention.
PLAIN = Recipe("qwen3_5", 24, 64, seed=3, config={"layer_types": LAYERS})


def plain(models):
    return AutoModelForCausalLM.from_pretrained(models.folder(PLAIN), dtype=torch.float32).eval()


def documents(vocab):
    return random_documents(vocab=vocab)


@pytest.fixture
def with_layer(models, tmp_path):
    """A teacher with the MTP layer of its target, and both as transformers computes them."""
    folder, main, layer = add_layer("qwen3_5", models, tmp_path / "target")
    teacher = Teacher(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ())
    return teacher, main, layer


@torch.no_grad()
def test_packed_documents_of_a_recurrent_target_are_read_alone(with_layer):
    teacher, main, _ = with_layer
    rows = pack_documents(documents(8), LENGTH)
    assert len(rows) < len(documents(8))
    reading = teacher.read(rows)
    for number, document in enumerate(documents(8)):
        tokens = torch.tensor([document.tokens])
        expected = main(tokens, output_hidden_states=True).hidden_states[-1][0]
        found = reading.final[rows.documents == number]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def expected_chain(main, layer, tokens, anchor, num_steps):
    """``[num_steps, vocab]`` logits of a draft from a position, each from a whole sequence."""
    block = layer.layers[0]
    ids = torch.tensor([tokens])
    states = main(ids, output_hidden_states=True).hidden_states[-1][:, : anchor + 1]
    logits = []
    for depth in range(num_steps):
        embedded = main.model.embed_tokens(ids[:, 1 : anchor + 2 + depth])
        positions = torch.arange(embedded.shape[1]).unsqueeze(0)
        out = block(
            embedded,
            states,
            position_embeddings=main.model.rotary_emb(embedded, position_ids=positions),
            attention_mask=None,
            position_ids=positions,
            past_key_values=None,
        )
        # In the next step the layer reads its own output in place of a state.
        states = torch.cat([states, out[:, -1:]], dim=1)
        logits.append(main.lm_head(out[0, -1]))
    return torch.stack(logits)


@torch.no_grad()
def test_chains_equal_whole_sequences(with_layer):
    teacher, main, expected_layer = with_layer
    layer = read_mtp(teacher.model, "target").layers[0].eval()
    follow_chains(layer)
    rows = pack_documents(documents(8), LENGTH)
    outs = torch.stack(
        list(
            unroll_mtp(
                layer,
                teacher.model.get_decoder().rotary_emb,
                rows,
                teacher.read(rows).final,
                teacher.embedding,
                NUM_STEPS,
            )
        )
    )
    logits, compared = teacher.logits_with_gradient(outs), 0
    for number, document in enumerate(documents(8)):
        own = logits[:, rows.documents == number]
        for anchor in range(len(document.tokens) - NUM_STEPS):
            expected = expected_chain(main, expected_layer, document.tokens, anchor, NUM_STEPS)
            torch.testing.assert_close(own[:, anchor], expected, atol=1e-4, rtol=1e-4)
            compared += 1
    assert compared > 30


def test_tensors_are_read_again():
    source, other = (torch.nn.Module() for _ in range(2))
    for seed, module in enumerate((source, other)):
        torch.manual_seed(seed)
        for name in ("enorm", "hnorm", "eh_proj", "post_norm"):
            setattr(module, name, torch.nn.Linear(2, 2))
        module.mtp_block = torch.nn.ModuleDict({"mlp": torch.nn.Linear(2, 2)})
    tensors = mtp_tensors(source)
    assert {"mtp.fc.weight", "mtp.norm.bias", "mtp.layers.0.mlp.weight"} < tensors.keys()
    load_mtp_tensors(other, {**tensors, "model.norm.weight": torch.zeros(1)})
    assert all(torch.equal(each, tensors[name]) for name, each in mtp_tensors(other).items())


def test_a_new_layer_is_another_pass_through_the_last_layer(models):
    model = plain(models)
    layer = new_mtp_layer(model)
    last = model.model.layers[-1].state_dict()
    assert all(torch.equal(each, last[n]) for n, each in layer.mtp_block.state_dict().items())
    x, h = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer.eh_proj(torch.cat([x, h], dim=-1)), x + h)


@pytest.mark.slow
def test_training_lowers_the_loss_and_leaves_the_target_alone(models):
    teacher = Teacher(plain(models), ())
    layer = new_mtp_layer(teacher.model)
    follow_chains(layer)
    rows = pack_documents(random_documents(12, vocab=24), LENGTH)
    ids = torch.arange(24)
    task = MtpTask(layer, teacher, rows, ids, SCHEDULE, SETTINGS)
    assert_trains_without_its_target(task, teacher.model, 0.5)
