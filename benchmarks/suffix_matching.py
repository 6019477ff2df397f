"""Time of the search for continuations in the requests' texts, relative to a pass of the target.

    python benchmarks/suffix_matching.py --target TARGET --text gsm8k_test.jsonl \
        --output benchmarks/results/suffix_matching.json

Each request's text is a part of the given one, with prompt and output of the given length together.
The search is that of ``suffix`` for all requests of a batch, in their own texts and in a corpus.
The pass reads one new token per request after a context of the same length. Both take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from turns import take_turns

from draftwise.benchmark.report import write_report
from draftwise.engine.suffix.corpus import SuffixCorpus
from draftwise.engine.suffix.matcher import SuffixMatcher
from draftwise.models.loading import load_model
from draftwise.models.segment import Segment


def tokens_of(text: Path, tokenizer: Any, count: int) -> list[int]:
    """The first tokens of all values of a file of JSON lines, repeated if they are too few."""
    lines = text.read_text().splitlines()
    words = "\n".join(" ".join(str(each) for each in json.loads(line).values()) for line in lines)
    found: list[int] = tokenizer(words[: 8 * count]).input_ids
    while len(found) < count:
        found = found + found
    return found[:count]


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[500, 8000])
    parser.add_argument("--corpus-tokens", type=int, default=1_000_000)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    longest, largest = max(arguments.contexts), max(arguments.batch_sizes)
    loaded = load_model(
        arguments.target, "target", torch.bfloat16, torch.device("cpu"), longest + 64
    )
    tokens = tokens_of(arguments.text, loaded.tokenizer, largest * longest)
    corpus = SuffixCorpus(arguments.corpus_tokens)
    documents = tokens_of(arguments.text, loaded.tokenizer, arguments.corpus_tokens)
    for start in range(0, len(documents), 2_000):
        corpus.add(documents[start : start + 2_000])
    rows = []
    for context in arguments.contexts:
        matcher = SuffixMatcher(largest, longest + 64, corpus)
        for slot in range(largest):
            matcher.begin(slot, tokens[slot * context : (slot + 1) * context])
        for batch_size in arguments.batch_sizes:
            cache = loaded.model.new_cache(batch_size, longest + 64)
            segments = [Segment(row, context, 1) for row in range(batch_size)]
            new, slots = tokens[:batch_size], range(batch_size)
            limits = [arguments.num_speculative_tokens] * batch_size
            times = take_turns(
                {
                    "search": partial(matcher.continuations, slots, limits),
                    "pass": partial(loaded.model.forward, cache, new, segments, slots),
                },
                arguments.turns,
            )
            medians = {name: statistics.median(every) for name, every in times.items()}
            share = statistics.median(
                search / one for search, one in zip(times["search"], times["pass"], strict=True)
            )
            rows.append({"context": context, "requests": batch_size, **medians, "share": share})
            print(
                f"context {context}  requests {batch_size}  search {medians['search']:.3f} ms"
                f"  pass {medians['pass']:.2f} ms  share {share:.2%}"
            )
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"searches": rows})


if __name__ == "__main__":
    main()
