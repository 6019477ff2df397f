"""What a companion knows of a draft, and the draft's distributions behind it."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftwise.checkpoints.heads import read_head
from draftwise.core.signals import overlap
from draftwise.distillation.companion import CompanionMeasures
from draftwise.distillation.documents import pack_documents
from draftwise.distillation.eagle3 import chain_logits_of_head
from draftwise.distillation.evaluation import HeldOut
from draftwise.distillation.scored_draft import LoadedDraft, default_size, find_draft
from draftwise.distillation.start import continued_head
from draftwise.errors import UnsupportedModelError

from ..tiny_heads import HeadRecipe
from .conftest import LENGTH, TARGET, random_documents, tiny_teacher

VOCAB = 24
DRAFT = TARGET.draft(0.5)
HEAD = HeadRecipe(vocab=VOCAB, draft_vocab=9, layers=(1, 2, 3))


def held_out(teacher, count=12):
    documents = [
        *random_documents(count, seed=1, temperature=0.5),
        *random_documents(count, seed=2, temperature=0.0),
    ]
    return documents, HeldOut(teacher, pack_documents(documents, LENGTH))


def scored(models, teacher, recipe=DRAFT):
    return find_draft(models.folder(recipe), models.folder(TARGET), LENGTH).load(teacher)


def at_temperature(values, temperature):
    suffix = f"/T={temperature:g}"
    return {
        name.removesuffix(suffix): value for name, value in values.items() if name.endswith(suffix)
    }


def test_overlaps_by_their_definition(models):
    """Of all tokens of the answers but the first, document by document."""
    teacher = tiny_teacher(models, ())
    documents, held = held_out(teacher)
    draft, companion = scored(models, teacher), scored(models, teacher, TARGET.draft(1.5))
    values = CompanionMeasures(companion.chain_logits, draft, 0)(held)
    names = {
        "target_overlap": (TARGET, TARGET.draft(1.5)),
        "draft_target_overlap": (TARGET, DRAFT),
        "overlap": (DRAFT, TARGET.draft(1.5)),
    }
    for temperature, scale in ((0.5, 0.5), (0.0, 1.0)):
        expected = {name: [] for name in names}
        for document in documents:
            if document.temperature != temperature:
                continue
            ids = torch.tensor([document.tokens])
            places = slice(document.num_prompt_tokens, len(document.tokens) - 1)
            for name, pair in names.items():
                with torch.no_grad():
                    p, q = (
                        (models.reference(each)(ids).logits[0, places] / scale).softmax(-1)
                        for each in pair
                    )
                expected[name] += overlap(p, q).tolist()
        found = at_temperature(values, temperature)
        for name, each in expected.items():
            assert found[name] == pytest.approx(sum(each) / len(each), abs=1e-4), name
        assert found["num_tokens"] == len(expected["overlap"])


def test_the_target_as_a_companion_knows_everything(models):
    """Its A is the acceptance probability, and no other companion has a larger gain."""
    teacher = tiny_teacher(models, ())
    _, held = held_out(teacher, 40)
    draft, target = scored(models, teacher), scored(models, teacher, TARGET)
    best = at_temperature(CompanionMeasures(target.chain_logits, draft, 0)(held), 0.5)
    copy = at_temperature(CompanionMeasures(draft.chain_logits, draft, 0)(held), 0.5)
    assert best["target_overlap"] == pytest.approx(1, abs=1e-5)
    assert best["correlation"] == pytest.approx(1, abs=1e-4)
    # A companion that equals the draft has S = A = 1 everywhere.
    assert copy["overlap"] == pytest.approx(1, abs=1e-5)
    assert copy["information"] == pytest.approx(0, abs=0.02)
    assert best["information"] > copy["information"] + 0.1
    assert 0 <= best["information"] <= best["entropy"] <= 1
    # The draft and its tokens are the same in both.
    for name in ("draft_target_overlap", "draft_acceptance", "draft_information", "entropy"):
        assert best[name] == copy[name]


def test_memory_is_bounded_by_parts_of_rows(models, monkeypatch):
    teacher = tiny_teacher(models, ())
    _, held = held_out(teacher)
    draft, companion = scored(models, teacher), scored(models, teacher, TARGET.draft(1.5))
    whole = CompanionMeasures(companion.chain_logits, draft, 0)(held)
    monkeypatch.setattr("draftwise.distillation.evaluation._MAX_PROBABILITIES", 3 * VOCAB)
    assert max(len(part.logits) for part in held.next_tokens()) == 3
    parts = CompanionMeasures(companion.chain_logits, draft, 0)(held)
    for name in ("target_overlap/T=0.5", "overlap/T=0", "num_tokens/T=0.5"):
        assert parts[name] == pytest.approx(whole[name], abs=1e-6)


def test_rows_without_two_tokens_of_an_answer_are_left_out(models):
    teacher = tiny_teacher(models, ())
    _, held = held_out(teacher)
    for row, *_ in held._batches:
        row.is_learned[:] = False
    assert list(held.next_tokens()) == []


def test_a_head_is_read_with_the_targets_states(models, tmp_path):
    folder = HEAD.save(tmp_path / "head", "speculators")
    found = find_draft(folder, models.folder(TARGET), LENGTH)
    assert found.layers(3) == (1, 2, 3)
    teacher = tiny_teacher(models, found.layers(3))
    head = found.load(teacher)
    assert head.target_ids.tolist() == HEAD.target_ids().tolist()
    config, weights = read_head(folder)
    own = continued_head(config, weights, torch.full((48,), 2.0))
    rows = pack_documents(random_documents(2), LENGTH)
    reading = teacher.read(rows)
    with torch.no_grad():
        logits = head.chain_logits(rows, reading, rows.is_learned, 2)
        expected = chain_logits_of_head(own, teacher.embedding, rows, reading, rows.is_learned, 2)
        for first, second in zip(logits, expected, strict=True):
            torch.testing.assert_close(first, second, atol=1e-4, rtol=1e-4)
    _, held = held_out(teacher)
    # A token that the head cannot propose has q = 0.
    chains = partial(lambda *given: iter([torch.zeros(int(given[2].sum()), VOCAB)]))
    values = CompanionMeasures(chains, head, 0)(held)
    assert values["overlap/T=0.5"] <= 9 / VOCAB + 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm.weight": None}, "has no norm.weight"),
        ({"layers.0.self_attn.q_norm.weight": torch.ones(6)}, "cannot be trained"),
    ],
)
def test_heads_with_other_tensors_than_eagle_3_are_refused(tmp_path, changes, message):
    config, weights = read_head(HEAD.save(tmp_path / "head", "speculators"))
    tensors = {**weights.tensors, **changes}
    present = {name: each for name, each in tensors.items() if each is not None}
    with pytest.raises(UnsupportedModelError, match=message):
        continued_head(config, replace(weights, tensors=present), torch.ones(48))


@pytest.mark.parametrize("vocab", [20, 30])
def test_logits_of_a_draft_have_the_width_of_the_target(models, vocab):
    """Padding differs. A token that the draft does not have is read as token 0 and never drawn."""
    teacher = tiny_teacher(models, ())
    draft = scored(models, teacher, replace(DRAFT, vocab=vocab))
    rows = pack_documents(random_documents(1), LENGTH)
    begins = rows.is_learned & (rows.positions < 4)
    (logits,) = draft.chain_logits(rows, teacher.read(rows), begins, 1)
    own = AutoModelForCausalLM.from_pretrained(models.folder(replace(DRAFT, vocab=vocab)))
    tokens = [token if token < vocab else 0 for token in random_documents(1)[0].tokens]
    with torch.no_grad():
        expected = own(torch.tensor([tokens])).logits[0, 3:5]
    assert logits.shape == (2, VOCAB)
    shared = min(vocab, VOCAB)
    torch.testing.assert_close(logits[:, :shared], expected[:, :shared], atol=1e-4, rtol=1e-4)
    assert (logits[:, shared:] == float("-inf")).all()
    assert isinstance(draft, LoadedDraft)


def test_the_size_of_a_companion_follows_from_the_draft(models, tmp_path):
    sizes = {"num_hidden_layers": 1, "hidden_size": 48, "num_attention_heads": 4}
    assert default_size(models.folder(replace(DRAFT, config=sizes))) == (1, 128)
    assert default_size("zoo:draft") == (2, 192)
    assert default_size(HEAD.save(tmp_path / "head", "speculators")) == default_size(None)
