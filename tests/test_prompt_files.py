"""Files of prompts are read in the forms in which benchmarks publish them."""

import json
import sys

import pytest

from draftwise.errors import PromptError
from draftwise.prompt_files import Question, load_questions

from .refusals import error_of

# The columns of SPEED-Bench. Its script writes messages in place of turns.
SPEED = {
    "question_id": "a1b2",
    "category": "coding",
    "sub_category": None,
    "source": "somewhere",
    "src_id": "somewhere_3",
    "difficulty": None,
    "multiturn": True,
}
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@pytest.fixture
def file(tmp_path):
    def write(*records, name="questions.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


def test_spec_bench(file):
    path = file(
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": []},
        {"question_id": 161, "category": "translation", "turns": ["Translate."]},
    )
    assert load_questions(path) == [
        Question(("Write.", "Again."), "writing", "81"),
        Question(("Translate.",), "translation", "161"),
    ]
    assert len(load_questions(str(path), 1)) == 1


def test_what_speed_benchs_script_writes(file):
    messages = [{"role": "user", "content": text} for text in ("Write.", "Again.")]
    (found,) = load_questions(file({**SPEED, "messages": messages}))
    assert found == Question(("Write.", "Again."), "coding", "a1b2")


def test_files_without_ids_and_categories(file):
    found = load_questions(file({"prompt": "a"}, {"question": "b", "category": None}))
    assert found == [Question(("a",), "questions", "1"), Question(("b",), "questions", "2")]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"turns": ["a", 1]}, ":1 has a turn that is not a text"),
        ({"turns": ["a", ""]}, ":1 has a turn that is not a text"),
        ({"messages": [{"role": "user", "content": [1]}]}, ":1 has a turn that is not a text"),
        ({"messages": [{"role": "system", "content": "a"}]}, "is not a user's"),
        ({"messages": ["a"]}, "is not a user's"),
        ({"messages": []}, "no text for any of the keys"),
        ({"turns": [PLACEHOLDER]}, "prepare.py fetches these prompts"),
        ({"turns": ["a", f"{PLACEHOLDER}\n\nmore"]}, "prepare.py fetches these prompts"),
    ],
)
def test_records_without_prompts_are_refused(file, record, why):
    error = error_of(load_questions, file(record), field="workload", error=PromptError)
    assert why in error.message
    assert error.field == "workload"


def test_parquet_without_its_reader(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    error = error_of(load_questions, file(name="test.parquet"), error=PromptError)
    assert "pip install 'draftwise[parquet]'" in error.message


def test_speed_bench_as_published(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{**SPEED, "turns": ["Write.", "Again."]}, {**SPEED, "turns": ["a"], "category": "qa"}]
    path = tmp_path / "test-00000-of-00001.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    assert load_questions(path) == [
        Question(("Write.", "Again."), "coding", "a1b2"),
        Question(("a",), "qa", "a1b2"),
    ]
    path.write_bytes(b"PAR1 is not all")
    assert "cannot read" in error_of(load_questions, path, error=PromptError).message
