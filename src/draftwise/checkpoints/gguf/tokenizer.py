"""The tokenizer of a model in a GGUF file."""

from __future__ import annotations

from typing import Any

from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftwise.checkpoints.gguf.file import GgufFile
from draftwise.checkpoints.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_PREFIX = "tokenizer.ggml."
_NONE = frozenset({"none", "no_vocab"})
_KINDS = ("gpt2", "llama", "gemma4")
# The token of each special one where a vocabulary of pieces does not say.
_DEFAULTS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load_tokenizer(file: GgufFile) -> Any:
    """Build the tokenizer of a file.

    ``transformers`` builds it. How texts are split is set here, as ``transformers`` knows few names
    of it and takes GPT-2's split for the others.

    Args:
        file: the file.

    Returns:
        A fast tokenizer; ``None`` if the file contains none.

    Raises:
        UnsupportedModelError: its kind, or how it splits texts, is not supported.
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
    _check_special_tokens(file)
    splits = _pre_tokenizer(file) if kind == "gpt2" else None
    try:
        tokenizer = PreTrainedTokenizerFast(
            gguf_file=file.path.name,
            name_or_path=str(file.path.parent),
            add_bos_token=splits is not None and splits.adds_bos,
        )
    except Exception as error:  # a broken file can make the library raise anything
        text = str(error).strip().splitlines()
        reason = text[0] if text else type(error).__name__
        raise file.error(f"has a tokenizer that transformers cannot build: {reason}") from error
    if splits is not None:
        splits.apply(tokenizer.backend_tokenizer)
    elif kind == "llama":
        _complete_pieces(file, tokenizer)
    return tokenizer


def _check_special_tokens(file: GgufFile) -> None:
    """Refuse special tokens that are not in the vocabulary."""
    num_tokens = len(file.value(f"{_PREFIX}tokens", []))
    for key in _SPECIAL_KEYS.values():
        token = file.value(_PREFIX + key)
        if token is not None and not (isinstance(token, int) and 0 <= token < num_tokens):
            raise file.error(
                f"has '{_PREFIX}{key}' = {token!r}, and its vocabulary has {num_tokens} tokens"
            )


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


def _complete_pieces(file: GgufFile, tokenizer: Any) -> None:
    """Set what ``transformers`` leaves out of a vocabulary of pieces."""
    texts = file.value(f"{_PREFIX}tokens")
    for name, token in _DEFAULTS.items():
        if file.value(_PREFIX + _SPECIAL_KEYS[name]) is None and token < len(texts):
            setattr(tokenizer, name, texts[token])
    tokenizer.add_bos_token = file.value(f"{_PREFIX}add_bos_token", True)
    tokenizer.update_post_processor()
    backend = tokenizer.backend_tokenizer
    has_prefix = isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace)
    if has_prefix and file.value(f"{_PREFIX}add_space_prefix", True) is False:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
