import json

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from draftwise.errors import PromptError
from draftwise.prompts import as_list, load_prompts, tokenize

from .chat_styles import GEMMA
from .refusals import error_of
from .tiny_models import BOS, EOS, MARK, byte_tokenizer


def test_reads_every_known_key(tmp_path):
    file = tmp_path / "prompts.jsonl"
    records = [{"prompt": "a"}, {"question": "b", "answer": "no"}, {"turns": ["c", "d"]}]
    file.write_text("\n\n".join(json.dumps(record) for record in [*records, {"text": "e"}]))
    assert load_prompts(file) == ["a", "b", "c", "e"]
    assert load_prompts(str(file), 2) == ["a", "b"]


def test_errors_name_file_and_line(tmp_path):
    file = tmp_path / "prompts.jsonl"
    for content, message in (
        ("", "contains no prompts"),
        ("not json", ":1 is not JSON"),
        ('{"prompt": "a"}\n[1]', ":2 has no text"),
        ('{"prompt": 3}', ":1 has no text"),
        ('{"turns": []}', ":1 has no text"),
    ):
        file.write_text(content)
        assert message in error_of(load_prompts, file, error=PromptError).message


def test_separators_within_strings_are_no_ends_of_lines(tmp_path):
    path = tmp_path / "prompts.jsonl"
    prompts = ["one\u2028two", "three\u2029\x85four"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    path.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8", newline="")
    assert load_prompts(path) == prompts


def test_unreadable_file(tmp_path):
    with pytest.raises(PromptError, match="cannot read"):
        load_prompts(tmp_path / "missing.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PromptError, match="cannot read"):
        load_prompts(tmp_path / "binary")


def ids_of(prompts):
    """Token ids of each prompt, without a tokenizer."""
    return [tokenize(None, prompt)[1] for prompt in as_list(prompts)]


ONE = [
    [1, 2, 3],
    (1, 2, 3),
    range(1, 4),
    np.array([1, 2, 3]),
    np.array([1, 2, 3], dtype=np.uint8),
    torch.tensor([1, 2, 3]),
    torch.tensor([1, 2, 3], dtype=torch.int32),
    list(np.array([1, 2, 3])),
    list(torch.tensor([1, 2, 3])),
    [1, np.int64(2), torch.tensor(3)],
]


def test_types_of_token_ids():
    for prompt in ONE:
        for ids in (ids_of(prompt), ids_of([prompt])):
            assert ids == [[1, 2, 3]]
            assert {type(token) for token in ids[0]} == {int}, type(prompt)
    for prompts in (
        [[1, 2], [3, 4]],
        ((1, 2), range(3, 5)),
        np.array([[1, 2], [3, 4]]),
        torch.tensor([[1, 2], [3, 4]]),
        [np.array([1, 2]), torch.tensor([3, 4])],
    ):
        assert ids_of(prompts) == [[1, 2], [3, 4]]


def test_invalid_prompts():
    for prompts, message in (
        ([True, 2], "integers, got True"),
        ([1, True], "integers, got True"),
        ([1, "2"], "integers, got '2'"),
        ([1, 2.0], "integers, got 2.0"),
        ([1.0, 2], "integers, got 1.0"),
        ([1, None], "integers, got None"),
        ([1, b"2"], "integers, got b'2'"),
        ([1, [2]], "integers, got [2]"),
        ([[1, True]], "integers, got True"),
        ([1, np.bool_(True)], "integers, got"),
        (np.array([1.0, 2.0]), "got ndarray of float64"),
        (np.array([True, False]), "got ndarray of bool"),
        (np.array(["a"]), "got ndarray of"),
        (torch.tensor([1.0]), "got Tensor of torch.float32"),
        (torch.tensor([True]), "got Tensor of torch.bool"),
        (np.zeros((1, 1, 1), int), "one dimension, got 3"),
        (np.array(5), "one dimension, got 0"),
        (b"abc", "got bytes; decode it"),
        ([b"abc"], "got bytes; decode it"),
        (bytearray(b"abc"), "got bytearray; decode it"),
        ([memoryview(b"abc")], "got memoryview; decode it"),
        ({1, 2}, "got set"),
        (5, "got int"),
        (None, "got NoneType"),
        ([None], "got NoneType"),
        (BatchEncoding({"input_ids": [1, 2]}), "pass its ['input_ids']"),
        ([{"input_ids": [1, 2]}], "pass its ['input_ids']"),
        ({"role": "user", "content": "a"}, "put the message into a list"),
        (np.array([], dtype=int), "is empty"),
        ([[]], "is empty"),
        ([""], "is empty"),
    ):
        error = error_of(ids_of, prompts, error=PromptError)
        assert error.field == "prompt"
        assert message in error.message


def test_a_text_that_begins_with_the_first_token_gets_no_second():
    plain = byte_tokenizer()
    for added, text, tokens in (
        (f"{BOS} $A", "ab c", [BOS, "ab c"]),
        (f"{BOS} $A", f"{BOS}ab c", [BOS, "ab c"]),
        (f"{BOS} $A", BOS, [BOS]),
        # A second token is kept where the text has two.
        (f"{BOS} $A", f"{BOS}{BOS}ab", [BOS, BOS, "ab"]),
        (f"{BOS} $A", f" {BOS}ab", [BOS, " ", BOS, "ab"]),
        (f"{BOS} $A", f"a{BOS}a", [BOS, "a", BOS, "a"]),
        (f"{BOS} $A", f"{MARK}ab", [BOS, MARK, "ab"]),
        (f"{BOS} $A {EOS}", f"{BOS}ab", [BOS, "ab", EOS]),
        (f"{MARK} {BOS} $A", "ab", [MARK, BOS, "ab"]),
        (f"{MARK} {BOS} $A", f"{MARK}{BOS}ab", [MARK, BOS, "ab"]),
        (f"{MARK} {BOS} $A", f"{MARK}ab", [MARK, BOS, MARK, "ab"]),
        (f"{MARK} {BOS} $A", f"{BOS}ab", [MARK, BOS, BOS, "ab"]),
        ("$A", f"{BOS}{BOS}ab", [BOS, BOS, "ab"]),
        ("$A", "aaa", ["a", "a", "a"]),
        (f"$A {EOS}", f"{EOS}{EOS}ab", [EOS, EOS, "ab", EOS]),
    ):
        expected = [token for each in tokens for token in plain(each)["input_ids"]]
        assert tokenize(byte_tokenizer(added=added), text) == (text, expected)
    with pytest.raises(PromptError, match="is empty"):
        tokenize(byte_tokenizer(added=f"{BOS} $A"), "")


def test_a_pasted_chat_has_the_tokens_of_the_chat():
    tokenizer = byte_tokenizer(GEMMA, f"{BOS} $A")
    text, ids = tokenize(tokenizer, [{"role": "user", "content": "abc d"}])
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenize(tokenizer, text) == (text, ids)
