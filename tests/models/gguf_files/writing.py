"""Writes the file of a case: weights, vocabulary, metadata."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np

from .architectures import ARCHITECTURES, VOCABULARY_SIZE, contents
from .case import FIRST_SPECIAL, Case

REFERENCE = Path(__file__).parent.parent / "gguf_reference.json"
NUM_TOKENS = 600
_MERGES = ["t h", "Ġ t", "th e", "i n", "Ġt h", "e r", "o n", "in g"]
_NORMAL, _UNKNOWN, _CONTROL, _UNUSED, _BYTE = 1, 2, 3, 5, 6
# Standard deviations of a product's results for an input of unit variance, and means of norms.
# Attention scores and logits are neither flat nor one-hot.
_SIZES = {
    "attn_q": 1.5,
    "attn_k": 1.5,
    "attn_qkv": 1.5,
    "ffn_gate_inp": 2.0,
    "token_embd": 2.0,
    "output": 2.0,
    "position_embd": 2.0,
    "attn_q_norm": 1.5,
    "attn_k_norm": 1.5,
}


def tokens() -> list[int]:
    """The tokens that every case is asked about: ordinary ones, the same for all."""
    return np.random.RandomState(0).randint(0, FIRST_SPECIAL, NUM_TOKENS).tolist()


def recorded() -> dict[str, Any]:
    """What llama.cpp answered: per case, see ``tools/gguf_reference``."""
    return json.loads(REFERENCE.read_text())


def _numbers(name: str, shape: tuple[int, ...], sizes: Mapping[str, float]) -> np.ndarray:
    """Random numbers that depend on the tensor's name and sizes only.

    They are uniform and from a generator that NumPy never changes, so that no rounding of a
    library's functions enters.
    """
    unit = 2 * np.random.RandomState(crc32(name.encode())).random_sample(shape) - 1
    part, kind = name.split(".")[-2:]
    if kind == "bias" or part == "attn_sinks":
        numbers = 0.5 * unit
    elif len(shape) == 1 and part != "ffn_gate_inp_shexp":
        numbers = sizes.get(part, 1.0) + 0.3 * unit
    else:
        numbers = sizes.get(part, 1.3) * np.sqrt(3 / shape[-1]) * unit
    return numbers.astype(np.float32)


def byte_texts() -> list[str]:
    """The texts of the 256 bytes in byte-level BPE, in GPT-2's order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in shown] + [chr(0x100 + at) for at in range(256 - len(shown))]


def _vocabulary(case: Case, writer: gguf.GGUFWriter, pieces: bool) -> list[str]:
    """Write texts, types, and merges or scores."""
    if pieces:
        texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        types = [_UNKNOWN, _CONTROL, _CONTROL] + [_BYTE] * 256
    else:
        texts = [*byte_texts(), *(merge.replace(" ", "") for merge in _MERGES)]
        types = [_NORMAL] * len(texts)
        writer.add_token_merges(_MERGES)
    texts += [f"▁{at}" for at in range(len(texts), FIRST_SPECIAL)]
    types += [_NORMAL] * (FIRST_SPECIAL - len(types))
    texts += case.special
    types += [case.special_type] * len(case.special)
    texts += [f"[PAD{at}]" for at in range(len(texts), VOCABULARY_SIZE)]
    types += [_UNUSED] * (VOCABULARY_SIZE - len(types))
    if pieces:
        writer.add_token_scores([-float(at) for at in range(VOCABULARY_SIZE)])
    writer.add_token_list(texts)
    writer.add_token_types(types)
    return texts


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    add[type(value)](name, value)


def make(
    case: Case,
    path: str | Path,
    blocks: gguf.GGMLQuantizationType | None = None,
    without_blocks: Container[str] = (),
) -> Path:
    """Write the file of a case.

    Args:
        case: A value of ``CASES`` or ``VOCABULARIES``.
        path: Where; an existing file is replaced.
        blocks: The type of the matrices but the router's and those whose rows no blocks divide;
            ``None`` for float32.
        without_blocks: Names of matrices that are stored in float16.

    Returns:
        The path.
    """
    of_file = {name: value for name, value in case.keys.items() if _is_whole(name)}
    own = {name: value for name, value in case.keys.items() if not _is_whole(name)}
    keys, tensors = contents(case.architecture, own, case.tensors)
    writer = gguf.GGUFWriter(str(path), case.architecture)
    for name, value in keys.items():
        _add(writer, f"{case.architecture}.{name}", value)
    _tokenizer(case, writer, of_file)
    sizes = {**_SIZES, **ARCHITECTURES[case.architecture].sizes}
    for name, value in tensors.items():
        if isinstance(value, list):
            writer.add_tensor(name, np.array(value, dtype=np.float32))
        else:
            numbers = _numbers(name, tuple(value), sizes)
            is_small = any(each in name for each in ("ffn_gate_inp", "bias", "norm"))
            if blocks is None or numbers.ndim < 2 or is_small or numbers.shape[-1] % 32:
                writer.add_tensor(name, numbers)
            elif name in without_blocks:
                writer.add_tensor(name, numbers.astype(np.float16))
            else:
                writer.add_tensor(name, gguf.quants.quantize(numbers, blocks), raw_dtype=blocks)
    save(writer)
    return Path(path)


def save(writer: gguf.GGUFWriter) -> None:
    """Write the file of a writer."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _is_whole(name: str) -> bool:
    return name.startswith(("general.", "tokenizer."))


def _tokenizer(case: Case, writer: gguf.GGUFWriter, changed: Mapping[str, Any]) -> None:
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": "<|bos|>",
        "tokenizer.ggml.eos_token_id": "<|eos|>",
        **changed,
    }
    texts = _vocabulary(case, writer, pieces=keys["tokenizer.ggml.model"] == "llama")
    for name, value in keys.items():
        if name.endswith("_token_id") and isinstance(value, str):
            value = texts.index(value)
        if value is not None:
            _add(writer, name, value)
