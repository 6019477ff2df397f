"""Parts of a speculative step with a large vocabulary, on a CPU.

    python benchmarks/large_vocabulary.py --target FOLDER --prompts gsm8k_test.jsonl \
        --output benchmarks/results/large_vocabulary.json

The draft is made of the target's first layers, so that it has the same vocabulary, unless another
one is given. First layers alone write nonsense. Their distributions are flat, and filters keep
thousands of tokens. The settings take turns: greedy, sampled, and sampled with filters or
penalties. Printed are medians over all steps without prompt tokens: milliseconds of each part, and
the share of a step that is neither a pass of the target nor a pass of the draft. Sampling the
draft's tokens belongs to that share.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftwise import LLM, SamplingParams
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import load_workload
from draftwise.kernels.native.drafting import DraftRun

PARTS = ("draft passes", "drawing", "select", "verify", "accept", "rest")
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "top-k 50": {"temperature": 1.0, "top_k": 50},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}


def save_first_layers(target: str, num_layers: int, folder: Path) -> None:
    """Save a model of the target's first layers."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    layers: Any = model.model.layers
    model.model.layers = layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:num_layers]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)


class Drawing:
    """Seconds in which tokens were drawn since the last look."""

    def __init__(self) -> None:
        self.seconds = 0.0
        draw = DraftRun.draw

        def timed(run: DraftRun, num_positions: int) -> None:
            before = run.drawing_seconds
            draw(run, num_positions)
            self.seconds += run.drawing_seconds - before

        DraftRun.draw = timed  # type: ignore[method-assign]

    def taken(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def run(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, drawing: Drawing
) -> list[list[float]]:
    """Generate once. Returns the seconds of each part, step by step."""
    engine, steps = llm.engine, []
    for prompt in prompts:
        engine.add(None, prompt, params)
    drawing.taken()
    while engine.num_unfinished:
        engine.step()
        times, drawn = engine.times, drawing.taken()
        if times.num_prompt_tokens == 0:
            parts = (times.draft - drawn, drawn, times.select)
            steps.append([*parts, times.verify, times.accept, times.rest])
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder of a model")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--draft", help="instead of the first layers")
    parser.add_argument("--draft-layers", type=int, default=6)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    drawing = Drawing()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.draft is None:
            save_first_layers(arguments.target, arguments.draft_layers, Path(folder))
        speculation = {
            "draft": arguments.draft or folder,
            "policy": "fixed",
            "num_speculative_tokens": arguments.num_speculative_tokens,
        }
        largest = max(arguments.batch_sizes)
        llm = LLM(
            arguments.target,
            speculation,
            "bfloat16",
            max_model_len=1024,
            max_batch_size=largest,
            enable_prefix_caching=False,
        )
    prompts = load_workload(llm, arguments.prompts, largest, 300, False).prompts
    measured: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
    cells = list(itertools.product(arguments.batch_sizes, SETTINGS))
    for turn in range(arguments.turns + 1):
        for batch_size, name in cells:
            params = SamplingParams(
                max_tokens=arguments.max_tokens, ignore_eos=True, seed=turn, **SETTINGS[name]
            )
            steps = run(llm, prompts[:batch_size], params, drawing)
            if turn:
                measured[batch_size, name] += steps
    table = Table(title="milliseconds per step, medians")
    for header in ("requests", "setting", *PARTS, "step", "outside the passes"):
        table.add_column(header, justify="right")
    results = []
    for batch_size, name in cells:
        steps = measured[batch_size, name]
        medians = [1e3 * statistics.median(column) for column in zip(*steps, strict=True)]
        whole = 1e3 * statistics.median(sum(step) for step in steps)
        outside = statistics.median(1 - (step[0] + step[3]) / sum(step) for step in steps)
        row = dict(zip(PARTS, medians, strict=True))
        results.append(
            {"requests": batch_size, "setting": name, **row, "step": whole, "outside": outside}
        )
        numbers = [f"{value:.2f}" for value in (*medians, whole)]
        table.add_row(str(batch_size), name, *numbers, f"{outside:.1%}")
    Console(width=140).print(table)
    if arguments.output:
        write_report(arguments.output, vars(arguments), {"results": results})


if __name__ == "__main__":
    main()
