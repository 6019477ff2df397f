"""The tokenizer of a model in a GGUF file.

``tokenizers`` computes it. The file has the vocabulary, and for byte-level vocabularies the merges.
How texts are split belongs to the name ``tokenizer.ggml.pre``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from draftwise.checkpoints.gguf.file import GgufFile
from draftwise.checkpoints.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_NONE = frozenset({"none", "no_vocab"})
_BYTE_LEVEL, _PIECES, _GEMMA4 = _KINDS = ("gpt2", "llama", "gemma4")
# Architectures whose vocabulary of pieces has no space before the first word. Its scores do not
# follow the order in which pieces are merged, and the order of the tokens does.
_GEMMAS = frozenset({"gemma", "gemma2", "gemma3"})
# An architecture that puts a space before texts that begin with a space, too.
_PHI3 = "phi3"
# The token of each special one where a vocabulary of pieces does not say.
_DEFAULTS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_CONTROL, _USER_DEFINED = 3, 4
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"
_FROM_PIECES = (decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse())


def load_tokenizer(file: GgufFile) -> Any:
    """Build the tokenizer of a file.

    Args:
        file: the file.

    Returns:
        A fast tokenizer; ``None`` if the file contains none.

    Raises:
        UnsupportedModelError: its kind, or how it splits texts, is not supported, or it is damaged.
    """
    kind = file.value(f"{_PREFIX}model")
    if kind is None or kind in _NONE:
        return None
    if kind not in _KINDS:
        raise file.error(
            f"has '{_PREFIX}model' = {kind!r}, which is not one of {', '.join(_KINDS)}"
        )
    if file.value(f"{_PREFIX}suppress_tokens"):
        raise file.error(
            f"has '{_PREFIX}suppress_tokens', and tokens that are never sampled are not supported"
        )
    special = _special_tokens(file, kind)
    try:
        if kind == _BYTE_LEVEL:
            splits = _pre_tokenizer(file)
            backend, adds_bos = _byte_level(file, splits), splits.adds_bos
        elif kind == _GEMMA4 or file.architecture in _GEMMAS:
            backend, adds_bos = _gemma_pieces(file, special["unk_token"]), kind != _GEMMA4
        else:
            backend, adds_bos = _pieces(file), True
    except Exception as error:  # ``tokenizers`` raises its errors as ``Exception``
        if type(error) is not Exception:
            raise
        raise file.error(f"has a tokenizer that cannot be built: {error}") from error
    # The chat templates of Gemma 4 write the first token.
    if kind != _GEMMA4:
        adds_bos = file.value(f"{_PREFIX}add_bos_token", adds_bos)
    _add_tokens(file, backend)
    return PreTrainedTokenizerFast(
        tokenizer_object=_Uncopied(backend),
        add_bos_token=adds_bos,
        add_eos_token=file.value(f"{_PREFIX}add_eos_token", False),
        chat_template=_chat_template(file),
        clean_up_tokenization_spaces=False,
        **special,
    )


class _Uncopied:
    """A tokenizer that ``transformers`` wraps without a copy, which takes a second."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, memo: Any) -> Tokenizer:
        return self._backend


def _tokens(file: GgufFile) -> list[str]:
    tokens: list[str] = file.value(f"{_PREFIX}tokens", [])
    return tokens


def _special_tokens(file: GgufFile, kind: str) -> dict[str, str | None]:
    """The special tokens that the file names; those outside the vocabulary are refused."""
    tokens, found = _tokens(file), {}
    for name, key in _SPECIAL_KEYS.items():
        token = file.value(_PREFIX + key)
        if token is not None and not (isinstance(token, int) and 0 <= token < len(tokens)):
            raise file.error(
                f"has '{_PREFIX}{key}' = {token!r}, and its vocabulary has {len(tokens)} tokens"
            )
        usual = _DEFAULTS.get(name) if kind == _PIECES else None
        if token is None and usual is not None and usual < len(tokens):
            token = usual
        found[name] = None if token is None else tokens[token]
    return found


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    """How a byte-level vocabulary splits texts; llama.cpp's default if the file does not say."""
    name = file.value(f"{_PREFIX}pre", "default")
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        raise file.error(
            f"has '{_PREFIX}pre' = {name!r}: how this vocabulary splits texts is not known; these "
            f"are: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return found


def _byte_level(file: GgufFile, splits: PreTokenizer) -> Tokenizer:
    """A vocabulary whose characters are bytes (Radford et al. 2019, GPT-2)."""
    merges = _merges(file)
    backend = Tokenizer(BPE(_ids(_tokens(file)), merges, ignore_merges=splits.ignores_merges))
    backend.pre_tokenizer = splits.sequence()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(file: GgufFile) -> Tokenizer:
    """A vocabulary of SentencePiece, with bytes for characters that it lacks."""
    tokens = _tokens(file)
    vocabulary = _ids(tokens)
    merges = _merges(file) or _derived_merges(vocabulary, file.value(f"{_PREFIX}scores", []))
    backend = Tokenizer(BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True))
    if file.architecture == _PHI3:
        marks = [normalizers.Prepend(_SPACE_MARK), normalizers.Replace(" ", _SPACE_MARK)]
        backend.normalizer = normalizers.Sequence(marks)
        backend.decoder = decoders.Sequence([*_FROM_PIECES, decoders.Strip(" ", 1, 0)])
        return backend
    has_prefix = file.value(f"{_PREFIX}add_space_prefix", True)
    scheme = "first" if has_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    stripped = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence([*_FROM_PIECES, *stripped])
    return backend


def _gemma_pieces(file: GgufFile, unknown: str | None) -> Tokenizer:
    """A vocabulary of SentencePiece without a space before the first word."""
    # Tokens of several spaces are stored as spaces.
    tokens = [token if token.strip(" ") else _SPACE_MARK * len(token) for token in _tokens(file)]
    vocabulary = _ids(tokens)
    merges = _merges(file) or _derived_merges(vocabulary, range(0, -len(tokens), -1))
    backend = Tokenizer(
        BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", _SPACE_MARK)
    backend.decoder = decoders.Sequence(list(_FROM_PIECES))
    return backend


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    """The merges of a file; empty if it has none."""
    merges = []
    for each in file.value(f"{_PREFIX}merges", []):
        # The left part may begin with a space.
        cut = each.find(" ", 1)
        merges.append((each[:cut], each[cut + 1 :]))
    return merges


def _derived_merges(
    vocabulary: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All pairs of tokens that make a token, the token with the highest score first.

    Of one token's pairs, the one with the longest left part is first.

    Args:
        vocabulary: tokens and their ids.
        scores: ``[tokens]`` by id.
    """
    found = []
    for token, number in vocabulary.items():
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in vocabulary:
                right = token[cut:]
                if right in vocabulary:
                    found.append((-scores[number], -cut, cut - len(token), left, right))
    found.sort(key=itemgetter(0, 1, 2))
    return [(left, right) for *_, left, right in found]


def _add_tokens(file: GgufFile, backend: Tokenizer) -> None:
    """Make control tokens and those that a user defined stay whole in texts.

    Control tokens are special: decoding may leave them out.
    """
    types = file.value(f"{_PREFIX}token_type", [])
    added: dict[int, list[AddedToken]] = {_CONTROL: [], _USER_DEFINED: []}
    for token, kind in zip(_tokens(file), types, strict=False):
        if kind in added and backend.token_to_id(token) is not None:
            is_control = kind == _CONTROL
            added[kind].append(AddedToken(token, normalized=False, special=is_control))
    backend.add_special_tokens(added[_CONTROL])
    backend.add_tokens(added[_USER_DEFINED])


def _chat_template(file: GgufFile) -> str | dict[str, str] | None:
    """The template of chats, or several by name."""
    template: str | None = file.value(_TEMPLATE)
    named = {
        key.removeprefix(f"{_TEMPLATE}."): file.value(key)
        for key in sorted(file.keys)
        if key.startswith(f"{_TEMPLATE}.")
    }
    if not named:
        return template
    return named if template is None else {"default": template, **named}
