"""Prompts from conversations, with earlier answers by the target."""

import json

import pytest

from draftwise import LLM, SamplingParams
from draftwise.benchmark.conversations import load_conversations, load_multi_turn_workload
from draftwise.errors import PromptError

from ..tiny_models import Recipe

TARGET = Recipe(vocab=300, context=256, tokenizer=True)


@pytest.fixture(scope="module")
def target(models):
    with LLM(models.folder(TARGET), None, dtype="float32", max_batch_size=4) as llm:
        yield llm


@pytest.fixture
def file(tmp_path):
    def write(*lines):
        path = tmp_path / "chats.jsonl"
        texts = (each if isinstance(each, str) else json.dumps(each) for each in lines)
        path.write_text("\n".join(texts) + "\n")
        return path

    return write


def test_lines_with_one_turn_are_skipped(file):
    path = file({"turns": ["a"]}, {"turns": ["a", "b"], "category": "letters"}, {"prompt": "c"}, "")
    (found,) = load_conversations(path)
    assert (found.turns, found.category) == (("a", "b"), "letters")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "chats.jsonl:1 is not JSON"),
        ({"turns": ["a", 1]}, "chats.jsonl:1 has a turn that is not a text"),
        ({"turns": ["a", ""]}, "chats.jsonl:1 has a turn that is not a text"),
        ({"turns": ["a"]}, "has no line with two or more turns"),
    ],
)
def test_invalid_files_are_refused(file, line, why):
    with pytest.raises(PromptError, match=why) as caught:
        load_conversations(file(line))
    assert caught.value.field == "workload"


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(PromptError, match="cannot read"):
        load_conversations(tmp_path / "nothing.jsonl")


def test_a_prompt_has_the_earlier_turns_and_the_targets_own_answers(target, file):
    path = file(
        {"turns": ["abc", "fed"], "category": "two"},
        {"turns": ["a", "b", "c"], "category": "three"},
    )
    workload = load_multi_turn_workload(target, path, 8, 200, 5)
    assert workload.name == "chats"
    assert sorted(workload.categories) == ["three", "two"]
    greedy = SamplingParams(max_tokens=5, temperature=0)
    for turns, category in ((["abc", "fed"], "two"), (["a", "b", "c"], "three")):
        messages = []
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            prompt = list(target.tokenize(messages))
            (output,) = target.generate([messages], greedy)
            messages.append({"role": "assistant", "content": output.text})
        assert workload.prompts[workload.categories.index(category)] == prompt


def test_conversations_that_become_too_long_are_replaced_by_later_ones(target, file):
    path = file(
        {"turns": ["a" * 90, "b"]},
        {"turns": ["a", "b" * 90]},
        {"turns": ["a", "c"]},
        {"turns": "ab"},
    )
    workload = load_multi_turn_workload(target, path, 1, 60, 5)
    assert len(workload.prompts) == 1
    assert len(workload.prompts[0]) <= 60
    with pytest.raises(PromptError, match=r"no conversation of .* has at most 4 tokens"):
        load_multi_turn_workload(target, path, 1, 4, 5)
