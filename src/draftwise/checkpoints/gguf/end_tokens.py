"""The tokens that end a text or a turn, as in llama.cpp."""

from __future__ import annotations

from draftwise.checkpoints.gguf.file import GgufFile

_PREFIX = "tokenizer.ggml."
# Special tokens that llama.cpp assumes where a file does not say, by the kind of vocabulary.
_DEFAULT_END = {"llama": 2, "gpt2": 11, "t5": 1}
_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<｜end▁of▁sentence｜>",
        "[e~[",
    }
)
# Tokens of models that fill in the middle of a text, by the key that names them. The first text of
# the vocabulary is the token if the file has no key.
_FILL_IN = {
    "fim_pad": frozenset({"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"}),
    "fim_rep": frozenset({"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"}),
    "fim_sep": frozenset({"<|file_sep|>"}),
}
# A token that does not end a text if the set has one of each group of others.
_ORDINARY = {
    "<|end|>": (
        ({"<|return|>"}, {"<|call|>", "<|calls|>"}),
        ({"<|flush|>"}, {"<|call|>", "<|calls|>"}),
    ),
    "</s>": (({"<|tool_response>", "<|plamo:eos|>"},),),
}


def end_tokens(file: GgufFile) -> frozenset[int]:
    """The tokens that end a text or a turn.

    They are the tokens that the file names as ends of a text, a turn or a message, and those whose
    text says so. Of models that fill in the middle of a text, they include the padding and the
    separators of files and repositories.
    """
    texts: list[str] = file.value(f"{_PREFIX}tokens", [])
    kind = file.value(f"{_PREFIX}model")

    def named(key: str, default: int | None) -> int | None:
        token = file.value(f"{_PREFIX}{key}_token_id", default)
        for each in (token, default):
            if isinstance(each, int) and 0 <= each < len(texts):
                return each
        return None

    found = {named("eos", _DEFAULT_END.get(kind)), named("eot", None), named("eom", None)}
    by_text = {text: token for token, text in enumerate(texts) if text in _TEXTS}
    found.update(by_text.values())
    for key, names in _FILL_IN.items():
        first = next((token for token, text in enumerate(texts) if text in names), None)
        found.add(named(key, first))
    tokens = {token for token in found if token is not None}
    present = {texts[token] for token in tokens}
    ordinary = {
        text
        for text, cases in _ORDINARY.items()
        if any(all(group & present for group in groups) for groups in cases)
    }
    return frozenset(token for token in tokens if texts[token] not in ordinary)
