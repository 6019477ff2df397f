"""Shared tokens of two vocabularies, and texts of one written in the other."""

import pytest
import torch

from draftwise.models.vocabulary_map import TokenTranslator, VocabularyMap, is_same_vocabulary
from draftwise.token_bytes import token_bytes

from ..tiny_models import byte_tokenizer, pieces_tokenizer

PIECES = ("<|end|>", "<|mark|>", "▁", "a", "▁a", "<0x61>", "<0xC3>", "<0xA9>", "é", "ab", "\n")


def translator(target, own):
    return TokenTranslator(target, own, len(target), len(own))


def spelled(tokenizer, tokens):
    return tokenizer.convert_ids_to_tokens(list(tokens))


def test_bytes_of_entries():
    assert token_bytes(pieces_tokenizer(PIECES)) == {
        2: b" ",
        3: b"a",
        4: b" a",
        5: b"a",
        6: b"\xc3",
        7: b"\xa9",
        8: "é".encode(),
        9: b"ab",
        10: b"\n",
    }


def test_bytes_of_a_byte_level_vocabulary():
    tokenizer = byte_tokenizer()
    found = token_bytes(tokenizer)
    assert {0, 1, 2}.isdisjoint(found)
    for text in ("abab d é", "€\n😀", " d"):
        tokens = tokenizer(text).input_ids
        assert b"".join(found[token] for token in tokens) == text.encode()


def test_entries_of_different_kinds_are_the_same_token():
    target, own = pieces_tokenizer(PIECES), byte_tokenizer()
    shared = translator(target, own).vocabulary
    pairs = set(zip(spelled(own, shared.own_ids), spelled(target, shared.target_ids), strict=True))
    assert pairs == {
        ("</s>", "<|end|>"),
        ("Ġ", "▁"),
        ("a", "a"),
        ("Ã", "<0xC3>"),
        ("©", "<0xA9>"),
        ("Ã©", "é"),
        ("ab", "ab"),
        ("Ċ", "\n"),
    }


def test_one_of_several_tokens_for_the_same_bytes_is_mapped():
    """The ordinary entry is, wherever it stands, because it is the one that tokenizers write."""
    for byte_first in [True, False]:
        target = pieces_tokenizer(("<0x61>", "a") if byte_first else ("a", "<0x61>"))
        shared = translator(target, byte_tokenizer()).vocabulary
        assert spelled(target, shared.target_ids) == ["a"], byte_first
        assert len(shared) == 1, byte_first


def test_an_end_of_sequence_token_may_be_an_ordinary_one():
    """The two that end a sequence are the same, so that the bytes of neither are shared."""
    for ordinary in ["target", "own", "both"]:
        target, own = pieces_tokenizer(("a", "b", "<|end|>")), byte_tokenizer()
        if ordinary in ("target", "both"):
            target.eos_token = "b"
        if ordinary in ("own", "both"):
            own.eos_token = "a"
        shared = translator(target, own).vocabulary
        pairs = set(
            zip(spelled(own, shared.own_ids), spelled(target, shared.target_ids), strict=True)
        )
        assert (
            pairs
            == {
                "target": {("</s>", "b"), ("a", "a")},
                "own": {("a", "<|end|>"), ("b", "b")},
                "both": {("a", "b")},
            }[ordinary]
        )


def test_tokens_beyond_the_logits_are_not_shared():
    target, own = pieces_tokenizer(PIECES), pieces_tokenizer(PIECES)
    shared = TokenTranslator(target, own, 4, 3).vocabulary
    assert shared.own_ids.tolist() == shared.target_ids.tolist() == [0, 1, 2]


def test_a_prompt_is_tokenized_as_a_whole():
    target, own = pieces_tokenizer(("a", "b", "▁", "<|end|>", "<|only|>")), byte_tokenizer()
    prompt = translator(target, own).prompt([0, 1, 2, 4, 0, 3, 1])
    assert spelled(own, prompt) == ["ab", "Ġ", "a", "</s>", "b"]


def test_a_prompt_begins_with_what_the_models_tokenizer_adds():
    own = pieces_tokenizer(("a", "<|begin|>"))
    own.backend_tokenizer.post_processor = begins_with("<|begin|>", 1)
    assert translator(pieces_tokenizer(("a", "b")), own).prompt([0]) == [1, 0]


def begins_with(token, number):
    from tokenizers.processors import TemplateProcessing

    return TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])


def test_tokens_that_are_not_shared_are_spelled():
    target = pieces_tokenizer(("▁ab", "▁", "a", "b", "▁a", "xb", "<0xE2>", "<|only|>"))
    own = byte_tokenizer()
    found = translator(target, own)
    assert spelled(own, found.token(0)) == ["Ġ", "ab"]
    assert spelled(own, found.token(5)) == ["b"], "x has no token at all"
    assert spelled(own, found.token(6)) == ["â"], "a part of a character is shared as a byte"
    assert found.token(7) == ()


def test_parts_of_characters_are_spelled_by_bytes():
    target = pieces_tokenizer(("<0xC3>", "<0xA9>", "a"))
    own = pieces_tokenizer(("a", "<0xC3>"))
    assert translator(target, own).prompt([2, 0]) == [0, 1]
    assert translator(target, own).prompt([2, 1]) == [0], "the model has no token for the byte"


def test_logits_move_to_the_targets_ids():
    shared = VocabularyMap({2: 0, 0: 3}, own_size=3, target_size=5)
    logits = shared.target_logits(torch.tensor([[1.0, 2.0, 3.0]]))
    assert logits.tolist() == [[3.0, -torch.inf, -torch.inf, 1.0, -torch.inf]]
    assert shared.own_tokens(torch.tensor([3, 0])).tolist() == [0, 2]
    assert (shared.own_id(3), shared.own_id(1)) == (0, None)


def test_a_map_is_one_to_one():
    with pytest.raises(ValueError, match="two tokens are mapped to one"):
        VocabularyMap({0: 1, 1: 1}, own_size=2, target_size=2)


def test_added_tokens_and_fillers_alone_may_differ():
    for first, second, same in [
        (("a", "b"), ("a", "b"), True),
        (("a", "b"), ("a", "b", "<|end|>"), True),
        (("a", "b", "<|one|>"), ("a", "b", "<|two|>"), False),
        (("a", "b"), ("b", "a"), False),
        (("a", "b"), ("a", "b", "ab"), False),
        (("a", "b"), ("a", "b", "[PAD2]", "[PAD3]"), True),
        (("a", "b", "<|end|>"), ("a", "b", "[PAD2]", "[PAD3]"), True),
        (("a", "b", "[PAD2]"), ("b", "a"), False),
    ]:
        tokenizers = pieces_tokenizer(first), pieces_tokenizer(second)
        assert is_same_vocabulary(*tokenizers) == is_same_vocabulary(*tokenizers[::-1]) == same
