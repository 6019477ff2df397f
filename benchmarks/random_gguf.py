"""A GGUF file with random weights, of a size that people run, to measure memory and time.

    python benchmarks/random_gguf.py --shape llama-3.1-8b --output random-8b.gguf
    python benchmarks/random_gguf.py --shape qwen3-30b-a3b --layers 12 --output random-moe.gguf

The tensors have the types of Q4_K_M: Q4_K, and Q6_K for the head, and for the values and the down
projection of every other layer. The tokenizer reads bytes; nearly all other tokens have no merges.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from tokenizers.pre_tokenizers import ByteLevel

SPAN = 256  # numbers of a block


@dataclass(frozen=True)
class Shape:
    """Sizes of a model."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab: int
    rope_base: float
    experts: int = 0
    used_experts: int = 0
    normalises_heads: bool = False


SHAPES = {
    "llama-3.1-8b": Shape("llama", 32, 4096, 32, 8, 128, 14336, 128256, 500000.0),
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 48, 2048, 32, 4, 128, 768, 151936, 1e6, 128, 8, normalises_heads=True
    ),
}


def random_blocks(kind: Type, rows: int, columns: int, random: np.random.Generator) -> Any:
    """``[rows, bytes]`` blocks of numbers with a mean of 0 and a deviation of 0.02, roughly."""
    count = rows * columns // SPAN
    if kind == Type.Q4_K:
        blocks = random.integers(0, 256, (count, 144), dtype=np.uint8)
        factors = np.array([1e-4, 7.5e-4], dtype=np.float16)
        blocks[:, :4] = factors.view(np.uint8)
    else:
        blocks = random.integers(0, 256, (count, 210), dtype=np.uint8)
        scales = random.integers(-64, 64, (count, 16), dtype=np.int8)
        blocks[:, 192:208] = scales.view(np.uint8)
        blocks[:, 208:] = np.array([3e-5], dtype=np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write(shape: Shape, path: Path) -> None:
    """Write a file."""
    random = np.random.default_rng(0)
    writer = GGUFWriter(path, shape.architecture, use_temp_file=True)
    writer.add_block_count(shape.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.rope_base)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used_experts)
        writer.add_expert_feed_forward_length(shape.inner)
    else:
        writer.add_rope_dimension_count(shape.head_size)
    letters = [*sorted(ByteLevel.alphabet()), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe" if shape.architecture == "llama" else "qwen2")
    writer.add_token_list(letters + [f"<{at}>" for at in range(shape.vocab - len(letters))])
    writer.add_token_types([1] * shape.vocab)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(shape.vocab - 1)

    def matrix(name: str, rows: int, columns: int, kind: Type = Type.Q4_K) -> None:
        blocks = random_blocks(kind, rows, columns, random)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)

    def experts(name: str, rows: int, columns: int, kind: Type = Type.Q4_K) -> None:
        blocks = random_blocks(kind, shape.experts * rows, columns, random)
        writer.add_tensor(f"{name}.weight", blocks.reshape(shape.experts, rows, -1), raw_dtype=kind)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))

    matrix("token_embd", shape.vocab, shape.hidden)
    matrix("output", shape.vocab, shape.hidden, Type.Q6_K)
    norm("output_norm", shape.hidden)
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        better = Type.Q6_K if layer % 2 else Type.Q4_K
        kv_size = shape.kv_heads * shape.head_size
        norm(f"{block}.attn_norm", shape.hidden)
        norm(f"{block}.ffn_norm", shape.hidden)
        matrix(f"{block}.attn_q", shape.heads * shape.head_size, shape.hidden)
        matrix(f"{block}.attn_k", kv_size, shape.hidden)
        matrix(f"{block}.attn_v", kv_size, shape.hidden, better)
        matrix(f"{block}.attn_output", shape.hidden, shape.heads * shape.head_size)
        if shape.normalises_heads:
            norm(f"{block}.attn_q_norm", shape.head_size)
            norm(f"{block}.attn_k_norm", shape.head_size)
        if shape.experts:
            router = random.normal(0, 0.02, (shape.experts, shape.hidden)).astype(np.float32)
            writer.add_tensor(f"{block}.ffn_gate_inp.weight", router)
            experts(f"{block}.ffn_gate_exps", shape.inner, shape.hidden)
            experts(f"{block}.ffn_up_exps", shape.inner, shape.hidden)
            experts(f"{block}.ffn_down_exps", shape.hidden, shape.inner, better)
        else:
            matrix(f"{block}.ffn_gate", shape.inner, shape.hidden)
            matrix(f"{block}.ffn_up", shape.inner, shape.hidden)
            matrix(f"{block}.ffn_down", shape.hidden, shape.inner, better)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--layers", type=int, help="number of layers; default: the model's")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    if arguments.layers:
        shape = Shape(**{**vars(shape), "layers": arguments.layers})
    write(shape, arguments.output)


if __name__ == "__main__":
    main()
