import numpy as np
import pytest

from draftwise.zoo.tokens import PackedStream, held_out_rows, joined, load_corpus

from .conftest import random_source


def stream(seed=0):
    sources = {"a": random_source(1), "b": random_source(2)}
    return PackedStream(sources, {"a": 3.0, "b": 1.0}, seed)


def test_documents_end_with_the_end_of_text_token():
    assert joined([[5, 6], [7]]).tolist() == [5, 6, 0, 7, 0]
    assert joined([]).tolist() == []


def test_resumed_stream_continues():
    first = stream()
    first.rows(7, 16)
    state = first.state_dict()
    expected = [first.rows(50, 16), first.rows(5, 32)]
    second = stream()
    second.load_state_dict(state)
    np.testing.assert_array_equal(second.rows(50, 16), expected[0])
    np.testing.assert_array_equal(second.rows(5, 32), expected[1])
    assert second.epochs() == first.epochs()


def test_an_epoch_visits_every_token_about_once():
    tokens = np.arange(1, 1001, dtype=np.uint16)
    packed = PackedStream({"only": tokens}, {"only": 1.0}, seed=4)
    inputs = packed.rows(10, 100)[:, :-1]
    assert sorted(inputs.flatten().tolist()) == list(range(1, 1001))
    assert packed.epochs() == {"only": 1.0}
    # A row has consecutive tokens, of the beginning after the end.
    assert np.isin(np.diff(packed.rows(40, 37)), [1, 1 - 1000]).all()


def test_source_shorter_than_a_row():
    assert PackedStream({"only": joined([[1, 2, 3]])}, {"only": 1.0}, seed=0).rows(2, 10).shape == (
        2,
        11,
    )


def test_weights_decide_how_often_a_source_is_read():
    packed = PackedStream(
        {"a": random_source(1), "b": random_source(1)}, {"a": 3.0, "b": 1.0}, seed=0
    )
    packed.rows(1000, 8)
    epochs = packed.epochs()
    assert epochs["a"] / epochs["b"] == pytest.approx(3.0, rel=0.2)


def test_held_out_rows_fit_a_short_source():
    assert held_out_rows(joined([[1, 2, 3, 4]]), 512, 100).tolist() == [[1, 2, 3, 4, 0]]


def test_corpus_without_data_or_cache(tmp_path, tokenizer_stub):
    with pytest.raises(FileNotFoundError, match="training stage"):
        load_corpus(tmp_path, None, tokenizer_stub, ("gsm8k",))


@pytest.fixture
def tokenizer_stub():
    class Stub:
        def get_vocab(self):
            return {"a": 0}

    return Stub()
