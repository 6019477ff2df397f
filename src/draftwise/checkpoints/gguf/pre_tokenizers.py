"""How a byte-level vocabulary splits a text before it merges bytes, by ``tokenizer.ggml.pre``.

A text is split by each expression in turn: into its matches, and into what lies between them.
llama.cpp knows the same names. Expressions that it computes in code of its own are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_DIGIT = r"\p{N}"


def _words(numbers: str, marks: str = "") -> str:
    """The split of GPT-4, with other numbers, and with marks that belong to words."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+|{numbers}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_LINES}|{_SPACES}"
    )


def _cased_words(numbers: str, contractions: str = "") -> str:
    """The split of GPT-4o: words begin with capitals."""
    first = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        f"{first}{upper}*{lower}+{contractions}|{first}{upper}+{lower}*{contractions}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}|{_SPACES}"
    )


_PUNCTUATED_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}|{_SPACES}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class PreTokenizer:
    """A way to split texts.

    Attributes:
        splits: expressions.
        ignores_merges: whether a split that is a token is not merged from bytes.
        adds_bos: whether texts begin with the token for it if the file does not say.
    """

    splits: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False

    def sequence(self) -> Any:
        """The same as a part of ``tokenizers``, for byte-level vocabularies."""
        splits = [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in self.splits]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])


_THREE_DIGITS = _words(r"\p{N}{1,3}")
_ONE_DIGIT = _words(_DIGIT)
_GROUPS: Mapping[str, PreTokenizer] = {
    "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4": (
        PreTokenizer((_GPT2,))
    ),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": PreTokenizer(
        (_DIGIT, _GPT2)
    ),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_THREE_DIGITS,), ignores_merges=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_THREE_DIGITS,)),
    "glm4 glm5": PreTokenizer((_THREE_DIGITS,), ignores_merges=True),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignores_merges=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": (
        PreTokenizer((_ONE_DIGIT,))
    ),
    "qwen35": PreTokenizer((_words(_DIGIT, r"\p{M}"),)),
    "gpt-4o llama4 kanana2 talkie minimax-m2": PreTokenizer(
        (_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),)
    ),
    "tekken": PreTokenizer((_cased_words(_DIGIT),), ignores_merges=True, adds_bos=True),
    "deepseek-v3 hunyuan-dense joyai-llm": PreTokenizer(
        (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _PUNCTUATED_WORDS)
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", _DIGIT)
    ),
    "seed-coder": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_LINES}|{_SPACES}",
        )
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "bloom gpt3-finnish poro-chat": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: each for names, each in _GROUPS.items() for name in names.split()
}
