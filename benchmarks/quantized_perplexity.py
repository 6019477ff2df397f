"""Perplexity and load time of a model with its own weights, and with weights of 8 and 4 bits.

    python benchmarks/quantized_perplexity.py --model FOLDER --text gsm8k_train.jsonl \
        --output benchmarks/results/quantized_perplexity.json

All variants score the same tokens, in chunks that begin with the tokenizer's first token.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

from gguf_perplexity import chunks_of, ours

from draftwise import LLM
from draftwise.benchmark.report import write_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--num-tokens", type=int, default=20_000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--formats", nargs="+", default=["", ":int8", ":int4"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name in arguments.formats:
        start = time.perf_counter()
        llm = LLM(
            f"{arguments.model}{name}",
            None,
            max_model_len=arguments.chunk + 8,
            max_batch_size=4,
            enable_prefix_caching=False,
        )
        seconds = time.perf_counter() - start
        chunks = chunks_of(llm, arguments.text, arguments.num_tokens, arguments.chunk)
        perplexity = math.exp(ours(llm, chunks))
        results[name or "own weights"] = {"perplexity": perplexity, "load_seconds": seconds}
        print(f"{name or 'own weights':12} perplexity {perplexity:.3f}, loaded in {seconds:.1f} s")
        llm.close()
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"results": results})


if __name__ == "__main__":
    main()
