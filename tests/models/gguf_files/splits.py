"""A vocabulary that shows how texts are split before bytes are merged.

It merges any two characters that are neighbours in the texts, those of different kinds first, so
that tokens cross the borders of words wherever a text is not split.
"""

from __future__ import annotations

import functools
import itertools
import unicodedata
from pathlib import Path

import gguf

from .writing import byte_texts, save

TEXTS = (
    "Hello world, this is a test of words.",
    "I have 12345 apples, 3.14159 pies and 1,000,000 v1.2.3 of 0x1F on 2024-11-28.",
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n\n\n",
    "  two spaces\tand\t\ttabs  trailing   ",
    "don't DON'T we'll I'M it's THEY'VE you'd CamelCase iPhone McDonald HTTPServer",
    "日本語のテキスト、中文字符。한국어 문장",
    "русский текст, ελληνικά, العربية ١٢٣ ½ ² Ⅷ",
    "emoji 🎉🎉!!! ??? … — «quotes» “curly” $5 + 3 = 8 <b>&amp;</b> ~^|`",
    "\r\nwindows\r\nlines\r\n\r\n",
    "ÀÉÎõü ﬁ Ａ e\u0301 \u0939\u093f\u0928\u094d\u0926\u0940",
    "http://example.com/a?b=c&d=1#e_f /path/to/file.txt",
    "a1b2c3 100km 7th 42 zyx",
    "wow!\n\nyes,\r\n no; (a)/\n b_c -d 'e' 's",
    "क्षि x\u0301y 'Tis 'RE O'NEIL ²a a²",
    " ",
    "\n\n a\n",
    "",
)
# Values of tokenizer.ggml.pre.
NAMES = (
    *("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion"),
    *("granite-docling", "exaone4", "smollm", "starcoder", "refact", "command-r", "codeshell"),
    *("exaone", "minerva-7b", "mellum2", "llama3", "llama-v3", "llama-bpe", "falcon3"),
    *("falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx", "smaug-bpe", "chatglm-bpe", "glm4"),
    *("glm5", "minicpm5", "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"),
    *("stablelm2", "hunyuan", "solar-open", "grok-2", "qwen35", "gpt-4o", "llama4", "kanana2"),
    *("talkie", "minimax-m2", "tekken", "deepseek-v3", "hunyuan-dense", "joyai-llm"),
    "deepseek-llm",
    *("deepseek-coder", "seed-coder", "falcon", "bloom", "gpt3-finnish", "poro-chat", "viking"),
    "default",
)
_NORMAL, _CONTROL = 1, 3
_BOS = "<|bos|>"
# A token that no merges lead to.
_WHOLE = "Ġzyx"


@functools.cache
def _spelling() -> dict[int, str]:
    """The text of each byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = shown + [byte for byte in range(0x100) if byte not in shown]
    return dict(zip(order, byte_texts(), strict=True))


def _spelled(text: str) -> list[str]:
    """The bytes of a text, as byte-level vocabularies spell them."""
    return [_spelling()[byte] for byte in text.encode()]


@functools.cache
def _merges() -> list[tuple[str, str]]:
    """Merges of bytes to characters, then of neighbours of different kinds, then of others."""
    found: dict[tuple[str, str], None] = {}
    for character in sorted(set("".join(TEXTS))):
        spelled = _spelled(character)
        for end in range(1, len(spelled)):
            found["".join(spelled[:end]), spelled[end]] = None
    pairs = sorted({pair for text in TEXTS for pair in itertools.pairwise(text)})
    pairs.sort(key=_order)
    for first, second in pairs:
        found["".join(_spelled(first)), "".join(_spelled(second))] = None
    return list(found)


def _order(pair: tuple[str, str]) -> int:
    """Capitals within a word come first, then other changes of kind."""
    first, second = map(unicodedata.category, pair)
    return 0 if (first, second) == ("Ll", "Lu") else 1 if first != second else 2


def make_vocabulary(name: str, path: str | Path) -> Path:
    """Write a file with a vocabulary and no model.

    Args:
        name: How it splits texts.
        path: Where; an existing file is replaced.

    Returns:
        The path.
    """
    merges = _merges()
    texts = [*byte_texts(), *dict.fromkeys("".join(pair) for pair in merges), _WHOLE, _BOS]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(texts)
    writer.add_token_types([_NORMAL] * (len(texts) - 1) + [_CONTROL])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(len(texts) - 1)
    writer.add_eos_token_id(len(texts) - 1)
    save(writer)
    return Path(path)
