"""The allowed next tokens are those that continue a prefix of some text of the grammar."""

import itertools
import json
import re
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftwise import StructuredOutputs
from draftwise.engine.grammars import GrammarCompiler
from draftwise.errors import InvalidParameterError, NumericalError

from ..refusals import error_of
from ..tiny_models import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
TOKENS = TOKENIZER.get_vocab()
END = TOKENS[EOS]
SPECIAL = 3
NAMES = {index: name for name, index in TOKENS.items()}
# No grammar below forces more than one token in a row. Otherwise only the tokenizer's own
# tokenization would be allowed.
LETTERS = ["".join(each) for n in (1, 2, 3) for each in itertools.product("abc", repeat=n)]
WORDS = {text + end for text in LETTERS for end in ("", ".", ",")}
REGEX = "[abc]{1,3}[.,]?"
CHOICE = ("a", "ac", "bd", "hg", "b")


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(TOKENIZER, frozenset([END]))


def begin(compiler, **grammar):
    return compiler.matcher(StructuredOutputs(**grammar))


def tokens_of(bits):
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())


def allowed_by(words, text):
    """Tokens that may follow a text, computed from all texts of a grammar."""
    allowed = {
        token
        for token, name in NAMES.items()
        if token >= SPECIAL and any(word.startswith(text + name) for word in words)
    }
    return allowed | ({END} if text in words else set())


def is_whole(words, text):
    return text in words and allowed_by(words, text) == {END}


@pytest.mark.parametrize(
    ("grammar", "words"),
    [({"regex": REGEX}, WORDS), ({"choice": CHOICE}, set(CHOICE))],
    ids=["regex", "choice"],
)
def test_exactly_the_valid_next_tokens_are_allowed(compiler, grammar, words):
    """Random drafts are discarded, rejected in the middle, and continued."""
    rng = np.random.default_rng(0)
    num_whole = 0
    for _ in range(60):
        matcher, text = begin(compiler, **grammar), ""
        while not matcher.is_complete:
            for _ in range(3):
                drafted, ahead = [], text
                for _ in range(4):
                    allowed = tokens_of(matcher.allowed(drafted))
                    assert allowed == allowed_by(words, ahead)
                    assert matcher.is_end(drafted) == (allowed == {END})
                    token = int(rng.choice(sorted(allowed)))
                    drafted.append(token)
                    if token == END:
                        break
                    ahead += NAMES[token]
            # Keep a prefix of the last draft and append another token.
            for token in drafted[: rng.integers(len(drafted) + 1)]:
                if token == END:
                    break
                assert matcher.take(token)
                text += NAMES[token]
            allowed = tokens_of(matcher.allowed([]))
            assert allowed == allowed_by(words, text)
            others = sorted(allowed - {END})
            if not others:
                break
            token = int(rng.choice(others))
            assert matcher.take(token)
            text += NAMES[token]
            assert matcher.is_complete == is_whole(words, text)
        num_whole += matcher.is_complete
        assert text in words
    assert num_whole


def test_only_the_end_token_is_allowed_after_a_complete_text(compiler):
    matcher = begin(compiler, choice=("bd",))
    for drafted in ([TOKENS["b"], TOKENS["d"]], [TOKENS["b"], TOKENS["d"], END, END]):
        assert tokens_of(matcher.allowed(drafted)) == {END}
        assert matcher.is_end(drafted)
    # After a forbidden token only the end is allowed. A draft without it continues.
    assert tokens_of(matcher.allowed([TOKENS["h"], TOKENS["a"]])) == {END}
    assert tokens_of(matcher.allowed([TOKENS["b"]])) == {TOKENS["d"]}
    assert matcher.take(TOKENS["b"])
    assert not matcher.is_complete
    assert matcher.take(TOKENS["d"])
    assert matcher.is_complete
    assert matcher.take(END)


def test_the_end_token_is_accepted(compiler):
    matcher = begin(compiler, regex="a*")
    assert matcher.take(TOKENS["a"])
    assert END in tokens_of(matcher.allowed([]))
    assert matcher.take(END)
    assert matcher.error is None


def test_a_forbidden_token_is_an_error(compiler):
    matcher = begin(compiler, regex="a+")
    assert not matcher.take(TOKENS["b"])
    assert isinstance(matcher.error, NumericalError)
    assert matcher.error.field == "target"
    assert "structured_outputs.regex" in str(matcher.error)


def test_a_grammar_that_the_tokens_cannot_spell_is_refused(compiler):
    with pytest.raises(InvalidParameterError, match="no token") as caught:
        begin(compiler, choice=("z",))
    assert caught.value.field == "structured_outputs.choice"
    matcher = begin(compiler, choice=("az",))
    assert not matcher.take(TOKENS["a"])
    assert isinstance(matcher.error, InvalidParameterError)
    # If the tokenizer cannot spell a forced word, the grammar library skips the missing bytes.
    matcher = begin(compiler, choice=("zebra",))
    assert not matcher.take(TOKENS["e"])
    assert isinstance(matcher.error, InvalidParameterError)


def test_a_draft_into_a_dead_end_is_rolled_back(compiler):
    matcher = begin(compiler, regex="a(z|b)|b")
    for _ in range(2):
        matcher.allowed([TOKENS["a"]])
        matcher.allowed([TOKENS["a"], TOKENS["b"]])
    assert matcher.take(TOKENS["b"])
    assert matcher.is_complete


def test_choices_are_literal():
    """Use a tokenizer that has every byte."""
    for words in [
        ('a"b', "a\\b", "a\nb", "a b"),
        ("é", "ñ€", "😀."),
        ("a|b", "(a)", "[a]", "a*", "a", "abc"),
    ]:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        plain = Tokenizer(models.BPE({each: index for index, each in enumerate(letters)}, []))
        plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        plain.decoder = decoders.ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>")
        end = tokenizer.eos_token_id
        compiler = GrammarCompiler(tokenizer, frozenset([end]))
        for word in words:
            matcher = begin(compiler, choice=words)
            ids = tokenizer(word, add_special_tokens=False)["input_ids"]
            assert all(matcher.take(token) for token in ids), words
            assert end in tokens_of(matcher.allowed([])), words
        wrong = tokenizer("a.b", add_special_tokens=False)["input_ids"]
        matcher = begin(compiler, choice=words)
        assert not all(matcher.take(token) for token in wrong), words


def test_tokenizers_with_byte_fallback():
    """Use a tokenizer like those converted from SentencePiece."""
    names = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "ab", "▁c"]
    plain = Tokenizer(
        models.BPE(
            {name: index for index, name in enumerate(names)},
            [("a", "b"), ("▁", "c")],
            byte_fallback=True,
        )
    )
    plain.normalizer = normalizers.Replace(" ", "▁")
    plain.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    compiler = GrammarCompiler(tokenizer, frozenset([0]))
    ids = tokenizer("ab cé ", add_special_tokens=False)["input_ids"]
    assert [names[index] for index in ids] == ["ab", "▁c", "<0xC3>", "<0xA9>", "▁"]
    matcher = begin(compiler, regex="(ab c|é )+")
    assert all(matcher.take(token) for token in ids)
    allowed = {names[token] for token in tokens_of(matcher.allowed([]))}
    assert allowed == {"</s>", "a", "ab", "<0x61>", "<0xC3>"}


def test_a_tokenizer_without_byte_tokens_is_refused():
    plain = Tokenizer(models.Unigram([("</s>", 0.0), ("▁", -2.0), ("a", -2.0)], 0))
    plain.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    with pytest.raises(InvalidParameterError, match="tokenizer cannot be used"):
        begin(GrammarCompiler(tokenizer, frozenset([0])), regex="a")


def test_several_end_tokens_are_allowed():
    compiler = GrammarCompiler(TOKENIZER, frozenset([END, 0]))
    assert tokens_of(begin(compiler, regex="(abc)?").allowed([])) >= {END, 0}


def test_invalid_grammars_name_the_field(compiler):
    for grammar in [
        {"json_schema": {"type": "strin"}},
        {"json_schema": {"type": "string", "minLength": 5, "maxLength": 2}},
        {"json_schema": {"not": {}, "type": "object"}},
        {"json_schema": {"$ref": "#/nowhere"}},
        {"regex": "a("},
        {"regex": "(?=a)b"},
        {"grammar": "start: nowhere"},
        {"grammar": 'root: "a"'},
    ]:
        caught = error_of(begin, compiler, **grammar, error=InvalidParameterError)
        assert caught.field == f"structured_outputs.{next(iter(grammar))}"
        assert "\n" not in str(caught)


class TestMissingParts:
    def test_without_the_library(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "llguidance.hf", None)
        with pytest.raises(InvalidParameterError, match=re.escape('"draftwise[serve]"')) as caught:
            begin(GrammarCompiler(TOKENIZER, frozenset([END])), regex="a")
        assert caught.value.field == "structured_outputs"

    def test_without_a_usable_tokenizer(self):
        for tokenizer, ends, match in [
            (None, [END], "no tokenizer"),
            (TOKENIZER, [], "no end-of-sequence token"),
            (object(), [END], "cannot be used"),
        ]:
            caught = error_of(
                begin,
                GrammarCompiler(tokenizer, frozenset(ends)),
                regex="a",
                error=InvalidParameterError,
                match=match,
            )
            assert caught.field == "structured_outputs", tokenizer


def with_all_bytes():
    """A tokenizer of the letters above and every other byte."""
    content = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(letter, len(vocab))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token=EOS
    )


BETWEEN = {
    "the standard": (None, ["", " ", "\n", "\n" + " " * 20], ["  ", "\t", "\n\n", "\n" + " " * 21]),
    "none": ({"whitespace_flexible": False}, [""], [" ", "\n"]),
    "any": ({"whitespace_flexible": True}, ["", " " * 30, "\n\t\n "], ["x"]),
    "its own": ({"whitespace_pattern": "_"}, ["", "_"], [" "]),
}


def test_whitespace_between_parts_of_json():
    for what in BETWEEN:
        own, right, wrong = BETWEEN[what]
        tokenizer = with_all_bytes()
        compiler = GrammarCompiler(tokenizer, frozenset([END]))
        schema = {"type": "array", "items": {"type": "null"}}
        if own is not None:
            schema["x-guidance"] = own
        for between in [*right, *wrong]:
            matcher = begin(compiler, json_schema=schema)
            text = f"[null,{between}null{between}]"
            taken = [matcher.take(token) for token in tokenizer(text)["input_ids"]]
            assert all(taken) == (between in right), what


def test_random_allowed_tokens_give_valid_json():
    """Random allowed tokens produce a text that the schema describes."""
    schema = {
        "type": "object",
        "properties": {
            "a": {"enum": ["ab", "cd"]},
            "b": {
                "type": "array",
                "items": {"type": "integer", "minimum": -3, "maximum": 14},
                "maxItems": 2,
            },
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    tokenizer = with_all_bytes()
    compiler = GrammarCompiler(tokenizer, frozenset([END]))
    rng = np.random.default_rng(1)
    for _ in range(30):
        matcher, said = begin(compiler, json_schema=schema), []
        while not matcher.is_complete:
            token = int(rng.choice(sorted(tokens_of(matcher.allowed([])))))
            assert matcher.take(token)
            said.append(token)
            if token == END:
                break
        value = json.loads(tokenizer.decode(said, skip_special_tokens=True))
        assert value["a"] in ("ab", "cd")
        assert all(-3 <= each <= 14 for each in value.get("b", ()))
