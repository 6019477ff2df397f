import json

import pytest

from draftwise.errors import PromptError
from draftwise.prompts import load_prompts


def test_reads_every_known_key(tmp_path):
    file = tmp_path / "prompts.jsonl"
    records = [{"prompt": "a"}, {"question": "b", "answer": "no"}, {"turns": ["c", "d"]}]
    file.write_text("\n\n".join(json.dumps(record) for record in [*records, {"text": "e"}]))
    assert load_prompts(file) == ["a", "b", "c", "e"]
    assert load_prompts(str(file), 2) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no prompts"),
        ("not json", ":1 is not JSON"),
        ('{"prompt": "a"}\n[1]', ":2 has no text"),
        ('{"prompt": 3}', ":1 has no text"),
        ('{"turns": []}', ":1 has no text"),
    ],
)
def test_says_what_is_wrong_and_where(tmp_path, content, says):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(PromptError, match=says):
        load_prompts(file)


def test_unreadable_file(tmp_path):
    with pytest.raises(PromptError, match="cannot read"):
        load_prompts(tmp_path / "missing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="cannot read"):
        load_prompts(tmp_path / "binary")
