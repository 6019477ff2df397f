import pathlib

import pytest

from draftwise.zoo.corpus import SOURCES, Document, read_documents
from draftwise.zoo.recipe import MIXTURE


def documents(source, data):
    return list(read_documents(source, data))


def test_mixture_covers_the_sources():
    assert set(MIXTURE) == set(SOURCES)
    assert sum(MIXTURE.values()) == pytest.approx(1.0)


def test_split_never_changes():
    # Pinned: another split would train on what earlier checkpoints were validated on.
    held_out = [i for i in range(400) if Document("s", f"key {i}", "").is_held_out]
    assert held_out == [71, 145, 183, 256, 319]


def test_two_percent_are_held_out():
    held_out = sum(Document("s", f"text {i}", "").is_held_out for i in range(20_000))
    assert 0.016 < held_out / 20_000 < 0.024


def test_split_depends_on_the_key_only():
    for i in range(200):
        first, second = Document("a", str(i), "one form"), Document("b", str(i), "another")
        assert first.is_held_out == second.is_held_out


def test_only_training_tasks_of_mbpp(data):
    texts = [document.text for document in documents("mbpp", data)]
    assert len(texts) == 2 * 374
    for task in (1, 11, 510, 511, 600):
        assert not any(f"number {task}." in text for text in texts)
    for task in (601, 974):
        assert sum(f"number {task}." in text for text in texts) == 2
    assert not any("\r" in text or "\t" in text for text in texts)


def test_both_forms_of_a_task_are_on_the_same_side(data):
    sides = {}
    for document in documents("mbpp", data):
        sides.setdefault(document.key, set()).add(document.is_held_out)
    assert all(len(side) == 1 for side in sides.values())


def test_gsm8k_has_no_calculator_annotations(data):
    texts = [document.text for document in documents("gsm8k", data)]
    assert texts[3] == "Question: What is 3+1?\nAnswer: It is 3+1=4."
    assert not any("<<" in text for text in texts)


def test_no_other_file_is_opened(data, monkeypatch):
    opened = []
    original = pathlib.Path.open

    def spy(path, *arguments, **options):
        opened.append(path)
        return original(path, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, "open", spy)
    texts = [document.text for source in SOURCES for document in documents(source, data)]
    assert {path.name for path in opened if path.parent == data} == {
        "gsm8k_train.jsonl",
        "mbpp.jsonl",
    }
    assert not any("FORBIDDEN" in text for text in texts)


def test_standard_library_without_tests_and_tables(data):
    library, tests = documents("stdlib", data), documents("tests", data)
    assert len(library) == len(tests) == 60
    assert all(document.text.startswith("# module") for document in library)
    assert all(document.text.startswith("# test") for document in tests)


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        documents("gsm8k", tmp_path)
