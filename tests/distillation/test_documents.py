"""Packing of documents, and the target's states of packed rows."""

import pytest
import torch

from draftwise.distillation.documents import (
    Document,
    RowStream,
    load_documents,
    pack_documents,
    save_documents,
)

from ..tiny_models import Recipe
from .conftest import LENGTH, load_target, random_documents, tiny_teacher


def test_every_document_is_packed_once():
    documents = random_documents(9)
    rows = pack_documents(documents, LENGTH)
    for number, document in enumerate(documents):
        mask = rows.documents == number
        assert rows.tokens[mask].tolist() == list(document.tokens)
        assert rows.positions[mask].tolist() == list(range(len(document.tokens)))
        learned = [index >= document.num_prompt_tokens for index in range(len(document.tokens))]
        assert rows.is_learned[mask].tolist() == learned
    assert rows.num_tokens == sum(len(each.tokens) for each in documents)
    assert len(rows) < len(documents)


def test_long_documents_are_cut():
    rows = pack_documents([Document(tuple(range(50)))], LENGTH)
    assert rows.tokens.tolist() == [list(range(LENGTH))]


def test_documents_are_saved(tmp_path):
    documents = [*random_documents(3), Document((1, 2, 3))]
    save_documents(tmp_path / "documents.npz", documents)
    assert load_documents(tmp_path / "documents.npz") == documents


def test_an_epoch_visits_every_row_once():
    stream = RowStream(7, seed=1)
    first, second = stream.next(7), stream.next(7)
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert stream.epochs == 2
    again = RowStream(7, seed=1)
    again.load_state_dict({"count": 5})
    assert again.next(9) == [*first[5:], *second]


def test_packed_documents_have_the_states_of_their_own(models):
    """With full attention, and with windows that are shorter than the documents."""
    for recipe in (
        Recipe(vocab=24, context=64, config={"num_hidden_layers": 3}),
        Recipe("gemma3_text", vocab=24, context=64),
    ):
        teacher = tiny_teacher(models, recipe=recipe)
        documents = random_documents(5)
        rows = pack_documents(documents, LENGTH)
        reading = teacher.read(rows)
        for number, document in enumerate(documents):
            mask = rows.documents == number
            with torch.no_grad():
                own = teacher._model(
                    input_ids=torch.tensor([document.tokens]), output_hidden_states=True
                )
            # The last of the states is normalised by transformers, and is read before.
            expected = torch.cat([own.hidden_states[1], own.hidden_states[2]], -1)[0]
            size = teacher.hidden_size
            torch.testing.assert_close(
                reading.states[mask][:, : 2 * size], expected, atol=1e-5, rtol=1e-5
            )
            last = teacher._model.base_model.norm(reading.states[mask][:, 2 * size :])
            torch.testing.assert_close(last, own.hidden_states[3][0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                teacher.logits(reading.final[mask]), own.logits[0], atol=1e-4, rtol=1e-4
            )


def test_logits_of_some_tokens_and_of_models_that_transform_them(models):
    for family in ("gemma2", "granite", "cohere"):
        teacher = tiny_teacher(models, (1,), Recipe(family, vocab=24, context=64))
        rows = pack_documents(random_documents(2), LENGTH)
        final = teacher.read(rows).final[0]
        with torch.no_grad():
            expected = teacher._model(
                input_ids=rows.tokens, position_ids=rows.positions, use_cache=False
            ).logits[0]
        ids = torch.tensor([3, 7, 20])
        torch.testing.assert_close(teacher.logits(final, ids), expected[:, ids])
        temperatures = torch.full((LENGTH,), 0.7)
        sums, best = teacher.normalizers(final, temperatures)
        torch.testing.assert_close(sums, (expected / 0.7).logsumexp(-1))
        assert torch.equal(best, expected.argmax(-1))


@pytest.mark.parametrize("family", ["llama", "cohere", "gemma"])
def test_the_final_norm_is_read(models, family):
    recipe = Recipe(family, vocab=24, seed=3)
    weight = load_target(models, recipe).base_model.norm.weight
    applied = weight + 1 if family == "gemma" else weight
    norm = tiny_teacher(models, (1,), recipe).final_norm()
    torch.testing.assert_close(norm, applied.float(), rtol=1e-3, atol=1e-3)
