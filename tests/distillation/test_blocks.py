"""Training of heads that draft blocks: their forward pass, their loss and what is exported."""

import math
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from draftwise import SamplingParams
from draftwise.checkpoints.heads.block_parsing import parse_block_head_config
from draftwise.distillation.block import DFlashRecipe, DSparkRecipe
from draftwise.distillation.block_start import default_states, mask_token
from draftwise.distillation.block_task import BLOCK_LOSSES, BlockTask, chain_logits_of_block
from draftwise.distillation.confidence import calibration_error, sequential_temperatures
from draftwise.distillation.data import Collected
from draftwise.distillation.documents import Document, pack_documents
from draftwise.distillation.evaluation import NUM_DRAFTED, HeldOut
from draftwise.distillation.settings import TrainingSettings
from draftwise.errors import InvalidParameterError, UnsupportedModelError
from draftwise.training.losses import LOSSES
from draftwise.training.optimizers import Optimizers
from draftwise.training.schedule import Schedule

from ..engine.assembly import generate
from ..engine.heads import engine_with_head, recorded_drafts
from ..tiny_blocks import BlockRecipe
from .conftest import LENGTH, TARGET, random_documents, tiny_teacher

RECIPES = {"dflash": DFlashRecipe, "dspark": DSparkRecipe}
LAYERS = (1, 2)
SIZES = {"draft_vocab": 12, "block_size": 6, "num_layers": 2, "num_anchors": 5}
MARKOV = {"markov_rank": 4}


def prepared(models, kind, documents, **own):
    """A head with random weights, as a recipe prepares it; its settings and its target."""
    own = {**SIZES, **(MARKOV if kind == "dspark" else {}), "loss": "dspark", **own}
    settings = TrainingSettings(kind, "target", ("prompts",), tokens=1, **own)
    teacher = tiny_teacher(models, LAYERS)
    rows = pack_documents(documents, LENGTH)
    schedule = Schedule(
        tokens=10**6, batch_tokens=4 * LENGTH, micro_batch_tokens=2 * LENGTH, decay_fraction=0.5
    )
    collected = Collected(documents, documents, frozenset(), 0.0)
    return RECIPES[kind](settings).prepare(teacher, collected, rows, schedule), teacher, rows


@torch.no_grad()
def randomise(head):
    """Random weights everywhere, also where a new head has zeros or those of its target."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in head.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1 + 0.3 * noise)
        else:
            parameter.copy_(2 * noise * parameter.shape[-1] ** -0.5)
    temperatures = 0.5 + torch.rand(head.config.num_drafted, generator=generator)
    head.confidence_temperatures.copy_(temperatures)


def along(head, teacher, document):
    """``[anchors, num_drafted, …]`` logits and confidences of the blocks of a document."""
    row = pack_documents([document], len(document.tokens))
    begins = torch.ones_like(row.is_learned)
    begins[:, -1] = False
    reading = teacher.read(row)
    count = head.config.num_drafted
    chain = chain_logits_of_block(head, teacher.embedding, row, reading, begins, count)
    return torch.stack(list(chain), dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [12, 24])
@pytest.mark.parametrize("kind", ["dflash", "vanilla", "gated", "rnn"])
def test_exported_heads_draft_as_they_were_trained(models, tmp_path, kind, vocab):
    """The folder, read by the loader, gives the logits of the trained module, with a cache."""
    name, own = ("dflash", {}) if kind == "dflash" else ("dspark", {"markov": kind})
    made, teacher, _ = prepared(models, name, random_documents(), draft_vocab=vocab, **own)
    head = made.task.model
    randomise(head)
    made.write(tmp_path)
    # Stored weights are in bfloat16.
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) == ("d2t" in stored) == (vocab < 24)
    head.load_weights(
        {key: each.float() for key, each in stored.items()}, torch.ones_like(head.state_scale)
    )
    head.projection = head.projection.bfloat16().float() if vocab < 24 else head.projection
    engine = engine_with_head(
        models,
        TARGET,
        folder=str(tmp_path),
        num_speculative_tokens=8,
        proposals="sampled",
        caches_prefixes=False,
        max_chunk_tokens=5,
    )
    drafts = recorded_drafts(engine)
    prompts = [[3, 1, 22], [5, 9, 9, 2, 17, 4, 0]]
    generate(
        engine, prompts, [SamplingParams(max_tokens=16, temperature=1.0, seed=i) for i in (0, 1)]
    )
    assert len(drafts) > 5
    for draft in drafts:
        document = Document((*draft.text, *draft.tokens))
        logits = along(head, teacher, document)[len(draft.text) - 2, : len(draft.tokens)]
        got = draft.q[:, made.target_ids]
        assert got.sum() == pytest.approx(len(draft.tokens), abs=1e-4)
        torch.testing.assert_close(got.log(), logits.log_softmax(-1), atol=1e-4, rtol=1e-4)


def test_blocks_ignore_other_blocks_and_other_documents(models):
    made, teacher, _ = prepared(models, "dspark", random_documents())
    head = made.task.model
    randomise(head)
    documents = random_documents(2)
    rows = pack_documents(documents, LENGTH)
    assert len(rows) == 1
    begins = rows.learned_after(1) & (rows.positions % 3 == 0)
    reading = teacher.read(rows)
    chains = partial(chain_logits_of_block, head, teacher.embedding)
    together = torch.stack(list(chains(rows, reading, begins, 5)), dim=1)
    for number, document in enumerate(documents):
        own = begins & (rows.documents == number)
        alone = along(head, teacher, document)[rows.positions[own]]
        # Later tokens read those before them, which the document may not have.
        torch.testing.assert_close(together[own[begins], 0], alone[:, 0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss", BLOCK_LOSSES)
def test_the_loss_by_its_definition(models, loss):
    """Token by token, with the target's distributions over its whole vocabulary."""
    documents = random_documents(5)
    made, teacher, rows = prepared(models, "dspark", documents, loss=loss)
    task, ids = made.task, made.target_ids.tolist()
    head, parts = task.model, BLOCK_LOSSES[loss]
    randomise(head)
    begins = task.eligible(rows)
    begins[:, ::2] = False
    with torch.no_grad():
        found = task.loss(rows, teacher.read(rows), begins)
    values = [[] for _ in range(head.config.num_drafted)]
    for number, document in enumerate(documents):
        own = pack_documents([document], len(document.tokens))
        p = teacher.logits(teacher.read(own).final[0]).softmax(-1)
        logits = along(head, teacher, document)
        hidden = confidence_of(head, teacher, own)
        for t in rows.positions[begins & (rows.documents == number)].tolist():
            for k in range(head.config.num_drafted):
                place = t + 2 + k
                if place >= len(document.tokens) or document.tokens[place] not in ids:
                    break
                log_q, target = logits[t, k].log_softmax(-1), p[place - 1, ids]
                value = -parts.of_token * log_q[ids.index(document.tokens[place])]
                loss_of = LOSSES[parts.distribution]
                own_loss, _ = loss_of(logits[t, k][None], (target / target.sum())[None])
                value = value + parts.of_distribution * own_loss[0]
                label = torch.minimum(target, log_q.exp()).sum()
                value = value + torch.nn.functional.binary_cross_entropy(hidden[t, k], label)
                values[k].append(float(value))
    assert len(values[1]) > 3
    weights = [math.exp(-k / 4) if each else 0.0 for k, each in enumerate(values)]
    means = [sum(each) / len(each) if each else 0.0 for each in values]
    expected = sum(w * each for w, each in zip(weights, means, strict=True)) / sum(weights)
    assert found.item() == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def confidence_of(head, teacher, row):
    """``[anchors, num_drafted]`` of one document, without temperatures."""
    length, count = row.tokens.shape[1], head.config.num_drafted
    anchors = torch.arange(1, length)[None]
    hidden = head(row, teacher.read(row).states, teacher.embedding, anchors)[0]
    columns = (anchors[0][:, None] + torch.arange(count)).clamp(max=length - 1)
    return torch.sigmoid(head.confidence_logits(hidden, row.tokens[0][columns]))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "loss"), [("dflash", "tokens"), ("dspark", "dspark")])
def test_training_lowers_the_loss_and_raises_the_acceptance(models, kind, loss):
    made, teacher, rows = prepared(
        models, kind, random_documents(24), draft_vocab=24, loss=loss, num_anchors=16
    )
    head, ids = made.task.model, made.target_ids
    schedule = Schedule(
        tokens=100, muon_learning_rate=0.01, adamw_learning_rate=0.01, decay_fraction=0.5
    )
    optimizers = Optimizers(head, made.is_matrix, schedule)
    held_out = HeldOut(teacher, rows)
    frozen = head.projection.clone()
    before = held_out.acceptance(made.chain_logits, ids, made.is_one_hot)
    values = []
    for step in range(60):
        values.append(made.task.backward(step / 60)[0])
        optimizers.step(step / 60)
    after = held_out.acceptance(made.chain_logits, ids, made.is_one_hot)
    assert sum(values[-4:]) < 0.9 * sum(values[:4])
    assert after["accepted_length/T=1"] > before["accepted_length/T=1"] + 0.2
    assert torch.equal(head.projection, frozen)
    if kind == "dspark":
        measured = made.measure(held_out)
        assert measured["confidence_error"] <= measured["confidence_error_raw"]
        assert not torch.equal(head.confidence_temperatures, torch.ones(6))


def test_kept_readings_give_the_same_loss(models):
    """What the target gives to all tokens is computed once for each row, and not in each step."""
    made, teacher, rows = prepared(models, "dspark", random_documents())
    task = made.task
    begins = task.eligible(rows)
    kept = task._readings.of(range(len(rows)))
    assert kept.log_sums is not None
    expected = task.loss(rows, teacher.read(rows), begins)
    torch.testing.assert_close(task.loss(rows, kept, begins), expected)
    assert task._readings.of([0]).log_sums.shape == (1, LENGTH)


def test_rows_without_anything_to_learn(models):
    made, teacher, _ = prepared(models, "dspark", random_documents())
    rows = pack_documents([Document(tuple(range(10)), 10)], LENGTH)
    schedule = Schedule(tokens=100, batch_tokens=LENGTH, micro_batch_tokens=LENGTH)
    settings = TrainingSettings(
        "dspark", "target", ("prompts",), tokens=1, loss="dspark", **SIZES, **MARKOV
    )
    task = BlockTask(made.task.model, teacher, rows, made.target_ids, schedule, settings)
    assert task.backward(0.0) == (0.0, 10)


def test_one_hot_acceptance_by_its_definition(models):
    """The length up to the first best token that is not that of the answer."""
    documents = random_documents(6, seed=4, temperature=0.7)
    made, teacher, rows = prepared(models, "dflash", documents, draft_vocab=24)
    head = made.task.model
    randomise(head)
    found = HeldOut(teacher, rows).acceptance(made.chain_logits, made.target_ids, True)
    lengths = []
    for document in documents:
        best = along(head, teacher, document).argmax(-1)
        for t in range(document.num_prompt_tokens, len(document.tokens) - NUM_DRAFTED - 1):
            answer = document.tokens[t + 2 : t + 2 + NUM_DRAFTED]
            agrees = [int(a == b) for a, b in zip(answer, best[t].tolist(), strict=False)]
            lengths.append(1 + sum(math.prod(agrees[: k + 1]) for k in range(NUM_DRAFTED)))
    assert max(lengths) > 1
    assert found["accepted_length/T=0.7"] == pytest.approx(sum(lengths) / len(lengths), abs=1e-5)


def test_sequential_temperatures_calibrate_each_product():
    """Confidences that are too sure of the first token, and not sure enough of the second."""
    generator = torch.Generator().manual_seed(0)
    true = 2 * torch.randn(20_000, 2, generator=generator)
    happened = (torch.rand(true.shape, generator=generator) < torch.sigmoid(true)).float()
    said = true * torch.tensor([2.0, 0.5])
    temperatures, errors = sequential_temperatures(said, happened.cumprod(1))
    assert temperatures.tolist() == pytest.approx([2.0, 0.5], rel=0.15)
    assert max(errors) < 0.02
    p, outcome = torch.tensor([0.11, 0.12, 0.95]), torch.tensor([0.0, 1.0, 1.0])
    assert calibration_error(p, outcome) == pytest.approx((abs(0.23 - 1) + 0.05) / 3)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_projection_is_stored_where_the_target_changes_its_logits(models, tmp_path, factor):
    """As heads are trained without the target's factor or limit of the logits."""
    teacher = tiny_teacher(models, LAYERS)
    plain = teacher._transform
    teacher._transform = lambda logits: factor * plain(logits)
    documents = random_documents()
    settings = TrainingSettings("dflash", "target", ("prompts",), tokens=1, loss="tokens")
    made = DFlashRecipe(settings).prepare(
        teacher,
        Collected(documents, documents, frozenset(), 0.0),
        pack_documents(documents, LENGTH),
        Schedule(tokens=100),
    )
    made.write(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (factor != 1)


def test_states_and_mask_tokens_of_new_heads():
    assert default_states(36, 5) == (2, 10, 18, 26, 34)
    assert default_states(28, 1) == (2, 14, 26)
    assert default_states(5, 2) == (1, 3, 4)
    assert mask_token([Document((1, 2, 2))], 6) == 5
    assert mask_token([Document((0, 1, 2, 2, 3, 3))], 4) == 1


def test_the_last_layers_output_is_refused(models):
    settings = TrainingSettings("dflash", "target", ("prompts",), tokens=1, layers=(1, 3))
    with pytest.raises(InvalidParameterError, match="last layer"):
        DFlashRecipe(settings).layers(3)
    assert DFlashRecipe(settings).layers(4) == (1, 3)


@pytest.mark.parametrize(
    "temperatures", [[1.0], [1.0, 1.0, 0.0, 1.0, 1.0, 1.0], [True] * 6, "none"]
)
def test_wrong_temperatures_of_a_head_are_refused(temperatures):
    recipe = BlockRecipe(markov="vanilla", confidence=True, block_size=6, discards_anchor=False)
    config = recipe.config("speculators") | {"confidence_temperatures": temperatures}
    with pytest.raises(UnsupportedModelError, match="confidence_temperatures"):
        parse_block_head_config(config)
