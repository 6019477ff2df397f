"""How fast the engine is on this machine, as ratios from interleaved runs.

1. Speculative against target-only decoding of the same engine, at batch 1, temperature 0 and 1.
2. Target-only decoding at batch 8 against ``transformers.generate``, one prompt after the other.

    python benchmarks/engine_speed.py --prompts gsm8k_test.jsonl

Prompts go through the target's chat template. Times include the prompts. Ratios are what counts:
absolute figures vary with the machine and with what else runs on it.
"""

from __future__ import annotations

import argparse
import platform
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.measure import (
    Comparison,
    Run,
    compare,
    timed_generate,
    warm_up,
    with_seeds,
)
from draftwise.benchmark.report import write_report
from draftwise.llm import Prompt
from draftwise.models.loading import locate
from draftwise.prompts import load_prompts


def against_transformers(
    llm: LLM, prompts: list[Prompt], max_tokens: int, batch_size: int
) -> tuple[Run, Run]:
    """Our batches and transformers' single prompts, taking turns: (ours, theirs)."""
    target_only = llm.with_speculation(None)
    theirs = AutoModelForCausalLM.from_pretrained(
        locate(llm.target.name, "target"), dtype=llm.target.model.dtype
    ).eval()
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    warm_up(target_only, prompts[0])
    ours_total, theirs_total = Run(), Run()
    for start in range(0, len(prompts), batch_size):
        part = prompts[start : start + batch_size]
        run = timed_generate(target_only, part, [params] * len(part))
        ours_total.outputs.extend(run.outputs)
        ours_total.seconds += run.seconds
        for output in run.outputs:
            ids = torch.tensor([output.prompt_token_ids])
            begin = time.perf_counter()
            with torch.inference_mode():
                theirs.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    min_new_tokens=len(output.token_ids),
                    max_new_tokens=len(output.token_ids),
                    do_sample=False,
                    pad_token_id=0,
                )
            theirs_total.seconds += time.perf_counter() - begin
            theirs_total.outputs.append(output)  # the same number of tokens
    return ours_total, theirs_total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8, help="against transformers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    console = Console(width=110)
    speculation = SpeculationConfig(
        draft=arguments.draft,
        policy="fixed",
        num_speculative_tokens=arguments.num_speculative_tokens,
    )
    llm = LLM(arguments.target, speculation, dtype="bfloat16", max_batch_size=8)
    prompts: list[Prompt] = [
        [{"role": "user", "content": text}]
        for text in load_prompts(arguments.prompts, arguments.num_prompts)
    ]

    table = Table(title=f"{arguments.target} + {arguments.draft}, bfloat16, {platform.machine()}")
    for name in ("", "batch", "tokens/s", "against", "ratio", "accepted", "per step"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    figures: dict[str, object] = {}
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=arguments.max_tokens, temperature=temperature, seed=0)
        result: Comparison = compare(llm, prompts, with_seeds(params, len(prompts)), batch_size=1)
        stats = result.speculative.stats
        table.add_row(
            f"γ={arguments.num_speculative_tokens} / target only, temperature {temperature:g}",
            "1",
            f"{result.speculative.tokens_per_second:.1f}",
            f"{result.target_only.tokens_per_second:.1f}",
            f"{result.speedup:.2f}",
            f"{stats.acceptance_rate:.2f}",
            f"{stats.mean_accepted_length:.2f}",
        )
        figures[f"speculative_over_target_only_t{temperature:g}"] = {
            "ratio": result.speedup,
            "acceptance_rate": stats.acceptance_rate,
            "mean_accepted_length": stats.mean_accepted_length,
            "num_identical": result.num_identical,
            "num_prompts": len(prompts),
        }
    ours, theirs = against_transformers(llm, prompts, arguments.max_tokens, arguments.batch_size)
    ratio = ours.tokens_per_second / theirs.tokens_per_second
    table.add_row(
        "target only / transformers one by one",
        str(arguments.batch_size),
        f"{ours.tokens_per_second:.1f}",
        f"{theirs.tokens_per_second:.1f}",
        f"{ratio:.2f}",
        "",
        "",
    )
    figures["batched_over_transformers_sequential"] = {"ratio": ratio}
    console.print(table)
    if arguments.output:
        write_report(arguments.output, vars(arguments), figures)


if __name__ == "__main__":
    main()
