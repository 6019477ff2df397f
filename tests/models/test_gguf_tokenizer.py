"""The tokenizers of GGUF files: how they split and begin texts, and which tokens end a text."""

import unicodedata
from dataclasses import replace

import pytest
import torch

from draftwise.checkpoints.gguf import GgufFile, load_tokenizer
from draftwise.checkpoints.gguf.end_tokens import end_tokens
from draftwise.checkpoints.gguf.pre_tokenizers import PRE_TOKENIZERS
from draftwise.errors import UnsupportedModelError
from draftwise.models.loading import load_model

from ..levels import exhaustive_unless
from ..refusals import error_of
from .gguf_files import NAMES, TEXTS, VOCABULARIES, Case, make, make_vocabulary, recorded

RECORDED = recorded()
ENDS = RECORDED["cases"]
# A name of each way to split texts.
REPRESENTATIVE = {each["names"][0] for each in RECORDED["splits"]}
# The expressions of these models' own tokenizers, used here, count combining marks to words.
# llama.cpp's expressions do not.
WORDS_WITH_MARKS = {"gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken"}


def test_ending_tokens_are_those_of_llama_cpp(tmp_path):
    for name in VOCABULARIES:
        file = GgufFile([make(VOCABULARIES[name], tmp_path / "case.gguf")], "target")
        texts = file.value("tokenizer.ggml.tokens")
        found = [texts[token] for token in sorted(end_tokens(file))]
        assert found == ENDS[name]["ends"]


def test_a_loaded_model_has_the_ending_tokens(tmp_path):
    name = "ends: harmony, eos is end"
    file = make(VOCABULARIES[name], tmp_path / "case.gguf")
    loaded = load_model(str(file), "target", torch.float32, torch.device("cpu"))
    names = loaded.tokenizer.convert_ids_to_tokens(sorted(loaded.eos_token_ids))
    assert names == ENDS[name]["ends"]


@pytest.mark.parametrize("name", exhaustive_unless(REPRESENTATIVE.__contains__, NAMES))
def test_texts_are_split_as_in_llama_cpp(tmp_path, name):
    expected = next(each["tokens"] for each in RECORDED["splits"] if name in each["names"])
    tokenizer = load_tokenizer(GgufFile([make_vocabulary(name, tmp_path / "a.gguf")], "target"))
    for text, tokens_of_text in zip(TEXTS, expected, strict=True):
        has_marks = any(unicodedata.category(each)[0] == "M" for each in text)
        if has_marks and name in WORDS_WITH_MARKS:
            assert tokenizer.encode(text) != tokens_of_text
        else:
            assert tokenizer.encode(text) == tokens_of_text, text


def test_an_unknown_split_is_refused(tmp_path):
    assert set(NAMES) == set(PRE_TOKENIZERS)
    file = GgufFile([make_vocabulary("invented", tmp_path / "a.gguf")], "target")
    with pytest.raises(UnsupportedModelError, match=r"'tokenizer.ggml.pre' = 'invented'"):
        load_tokenizer(file)


def test_pieces_begin_as_the_file_says(tmp_path):
    for keys, prefix, bos in [
        ({}, "▁", True),
        ({"tokenizer.ggml.add_space_prefix": False}, "", True),
        ({"tokenizer.ggml.add_bos_token": False}, "▁", False),
    ]:
        for name in ("ends: sentencepiece", "ends: sentencepiece, no keys"):
            case = VOCABULARIES[name]
            file = make(replace(case, keys={**case.keys, **keys}), tmp_path / "case.gguf")
            tokenizer = load_tokenizer(GgufFile([file], "target"))
            start = ["<s>"] if bos and name.endswith("no keys") else ["<|bos|>"] if bos else []
            spelled = [f"<0x{byte:02X}>" for byte in f"{prefix}é".encode()]
            assert tokenizer.convert_ids_to_tokens(tokenizer.encode("é")) == start + spelled, keys
            assert tokenizer.decode([299]) == ("299" if prefix else " 299"), keys


def test_other_tokenizers_are_refused(tmp_path):
    for keys, named in [
        ({"tokenizer.ggml.model": "rwkv"}, "'tokenizer.ggml.model' = 'rwkv'"),
        ({"tokenizer.ggml.suppress_tokens": [5]}, "'tokenizer.ggml.suppress_tokens'"),
        ({"tokenizer.ggml.padding_token_id": 999}, "'tokenizer.ggml.padding_token_id' = 999"),
    ]:
        file = GgufFile([make(Case("llama", keys), tmp_path / "case.gguf")], "target")
        raised = error_of(load_tokenizer, file, error=UnsupportedModelError)
        assert named in raised.message
