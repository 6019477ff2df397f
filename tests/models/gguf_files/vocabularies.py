"""Vocabularies: which tokens end a generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .case import Case


def _vocabulary(*special: str, eos: str | None = "<|eos|>", **keys: Any) -> Case:
    """A vocabulary with special tokens; ``eot="…"`` sets ``tokenizer.ggml.eot_token_id``."""
    ids = {f"tokenizer.ggml.{name}_token_id": text for name, text in {"eos": eos, **keys}.items()}
    return Case("llama", ids, special=("<|bos|>", "<|eos|>", *special))


_QWEN_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)
_LLAMA3_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
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
    "<｜end▁of▁sentence｜>",
    "[e~[",
)
_SENTENCEPIECE = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": None}

# Tokens that end a generation, by the special tokens and the keys that name some of them.
VOCABULARIES: Mapping[str, Case] = {
    "ends: eos only": _vocabulary("<|assistant|>", "<|tool|>"),
    "ends: no eos key": _vocabulary("<|assistant|>", eos=None),
    "ends: eos outside the vocabulary": _vocabulary(eos=10_000),
    "ends: eos is an ordinary token": _vocabulary("<|im_end|>", eos="the"),
    "ends: eot and eom are ordinary tokens": _vocabulary(eot="the", eom="in"),
    "ends: by their texts": _vocabulary(*_ENDS),
    "ends: by their texts, eot key": _vocabulary(*_ENDS, eot="the"),
    "ends: by their texts, of type normal": replace(_vocabulary(*_ENDS), special_type=1),
    "ends: by their texts, of type user-defined": replace(_vocabulary(*_ENDS), special_type=4),
    "ends: by their texts, of type unused": replace(_vocabulary(*_ENDS), special_type=5),
    "ends: qwen": _vocabulary(*_QWEN_TOKENS, eos="<|im_end|>"),
    "ends: qwen base": _vocabulary(*_QWEN_TOKENS, eos="<|endoftext|>"),
    "ends: qwen, eot key": _vocabulary(*_QWEN_TOKENS, eos="<|im_end|>", eot="<|endoftext|>"),
    "ends: qwen, fim keys": _vocabulary(
        *_QWEN_TOKENS,
        eos="<|im_end|>",
        fim_pad="<|fim_prefix|>",
        fim_rep="<|fim_middle|>",
        fim_sep="<|fim_suffix|>",
        fim_pre="the",
    ),
    "ends: llama 3": _vocabulary(*_LLAMA3_TOKENS, eos="<|eot_id|>"),
    "ends: llama 3 base": _vocabulary(*_LLAMA3_TOKENS, eos="<|end_of_text|>"),
    "ends: llama 3, keys": _vocabulary(
        *_LLAMA3_TOKENS, eos="<|end_of_text|>", eot="<|eot_id|>", eom="<|eom_id|>"
    ),
    "ends: harmony": _vocabulary(
        "<|start|>", "<|end|>", "<|message|>", "<|return|>", "<|call|>", eos="<|return|>"
    ),
    "ends: harmony, eot key": _vocabulary("<|end|>", "<|return|>", "<|call|>", eot="<|end|>"),
    "ends: harmony without call": _vocabulary("<|end|>", "<|return|>", eos="<|return|>"),
    "ends: harmony, eos is end": _vocabulary("<|end|>", "<|return|>", "<|call|>", eos="<|end|>"),
    "ends: solar": _vocabulary("<|end|>", "<|flush|>", "<|calls|>", eos="<|flush|>"),
    "ends: return and calls": _vocabulary("<|end|>", "<|return|>", "<|calls|>"),
    "ends: call and flush": _vocabulary("<|end|>", "<|call|>", "<|flush|>"),
    "ends: gemma 3": _vocabulary("<eos>", "<start_of_turn>", "<end_of_turn>", eos="<eos>"),
    "ends: gemma 4": _vocabulary("<eos>", "</s>", "<turn|>", "<|tool_response>", eos="<eos>"),
    "ends: gemma 4, eos is </s>": _vocabulary("</s>", "<turn|>", "<|tool_response>", eos="</s>"),
    "ends: tool_response with two bars": _vocabulary("</s>", "<|tool_response|>"),
    "ends: plamo": _vocabulary("</s>", "<|plamo:eos|>", eos="<|plamo:eos|>"),
    "ends: plamo, another eos": _vocabulary("</s>", "<|plamo:eos|>"),
    "ends: granite": _vocabulary("<|end_of_text|>", "<fim_prefix>", "<fim_pad>", "<reponame>"),
    "ends: starcoder": _vocabulary("<|endoftext|>", "<fim-pad>", "<fim-repo>", "<file_sep>"),
    "ends: kimi": _vocabulary("[BOS]", "[EOS]", "[EOT]", "[PAD]", eos="[EOS]"),
    "ends: code llama": _vocabulary("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", "<PAD>", "<REPO>"),
    "ends: fim_repo": _vocabulary("<|fim_repo|>", "<fim_sep>"),
    "ends: phi": _vocabulary("<|system|>", "<|user|>", "<|end|>", "<|endoftext|>", eos="<|end|>"),
    "ends: deepseek": _vocabulary("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"),
    "ends: sentencepiece": Case("llama", _SENTENCEPIECE),
    "ends: sentencepiece, no keys": Case(
        "llama",
        {
            **_SENTENCEPIECE,
            "tokenizer.ggml.bos_token_id": None,
            "tokenizer.ggml.eos_token_id": None,
        },
    ),
}
