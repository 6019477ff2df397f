"""What S and A tell of acceptance, for ordered triples of a model family.

    python benchmarks/information.py --prompts gsm8k_test.jsonl humaneval.jsonl spec_bench.jsonl \
        --output benchmarks/results/information.json --table docs/information.md

For every target, draft and companion: plain speculative decoding, then H(X) and H(X | S, A) in the
four binnings of Speculative Verification, for X = the token was kept (among those that were
tested), with the estimate that permutations correct beside the plain one; the same gain for H(q),
q(x) and history alone; the correlation of S(draft, companion) with S(draft, target) over drafted
positions. The latter is measured by judging the same drafts, from the same seeds, once more with
the target for a companion. In float32, so that both runs draft the same.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import chat_prompts
from draftwise.engine.assembly import Models
from draftwise.profiling.acceptance import collect
from draftwise.studies.information_gain import BINNINGS, SINGLE, figures_of_triple, triples


def measure(
    models: Models, prompts: list[list[int]], params: SamplingParams, gamma: int
) -> dict[str, Any]:
    """All figures of one triple."""
    options = {"num_speculative_tokens": gamma, "batch_size": 16}
    records = collect(models, prompts, params, **options).records
    told = collect(replace(models, companion=models.target), prompts, params, **options).records
    return figures_of_triple(records, told)


PAGE = """# What the signals tell

Made by `benchmarks/information.py` on the bundled family ({prompts}; temperature {temperature},
{max_tokens} tokens each, drafts of {gamma}). X is whether a tested token was kept; all figures are
in bits. "Plain" is what the observed frequencies give, which finer bins always raise; "corrected"
is that less what the same bins give when the fates are permuted. Pearson's correlation is between
S(draft, companion) and S(draft, target) at the drafted positions.

"""


def markdown(results: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """Two tables: the binnings, and the signals by themselves."""
    page = PAGE.format(
        prompts=", ".join(path.stem for path in arguments.prompts),
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        gamma=arguments.num_speculative_tokens,
    )
    lines = [
        "## S and A in four binnings",
        "",
        "| target | draft | companion | acceptance | H(X) | "
        + " | ".join(f"H(X \\| S,A) {b}" for b in BINNINGS)
        + " | I(X; S,A) 20x20, plain | adaptive, plain | 20x20, corrected | adaptive, corrected "
        + "| Pearson |",
        "|---" * 14 + "|",
    ]
    for r in results:
        cells = [r["target"], r["draft"], r["companion"], f"{r['mean_acceptance']:.2f}"]
        cells.append(f"{r['entropy']:.3f}")
        cells += [f"{r[f'S,A {b}']['conditional_entropy']:.3f}" for b in BINNINGS]
        cells += [f"{r['S,A 20x20']['plain']:.3f}", f"{r['S,A adaptive']['plain']:.3f}"]
        cells += [f"{r['S,A 20x20']['corrected']:.3f}", f"{r['S,A adaptive']['corrected']:.3f}"]
        cells.append(f"{r['pearson']:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "## Each signal by itself, corrected", ""]
    lines.append("| target | draft | companion | " + " | ".join(SINGLE) + " | S,A 10x10 |")
    lines.append("|---" * 9 + "|")
    for r in results:
        cells = [r["target"], r["draft"], r["companion"]]
        cells += [f"{r[name]['corrected']:.3f}" for name in (*SINGLE, "S,A 10x10")]
        lines.append("| " + " | ".join(cells) + " |")
    return page + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=["zoo:target", "zoo:mid"])
    parser.add_argument(
        "--small", nargs="+", default=["zoo:draft", "zoo:mid", "zoo:companion", "zoo:spare"]
    )
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--num-prompts", type=int, default=40, help="of each file")
    parser.add_argument("--longest-prompt", type=int, default=300, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path, help="also write the tables as Markdown")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    params = SamplingParams(
        max_tokens=arguments.max_tokens, temperature=arguments.temperature, seed=0
    )
    results: list[dict[str, Any]] = []
    for target in arguments.targets:
        llm = LLM(target, dtype="float32")
        prompts = chat_prompts(
            llm, arguments.prompts, arguments.num_prompts, arguments.longest_prompt
        )
        for _, draft, companion in triples([target], arguments.small):
            models = llm.load_models(SpeculationConfig(draft, companion=companion, policy="sv"))
            figures = measure(models, prompts, params, arguments.num_speculative_tokens)
            names = {"target": target, "draft": draft, "companion": companion}
            results.append(names | figures)
            console.print(
                f"{target} {draft} {companion}: H(X) {figures['entropy']:.3f}, "
                + ", ".join(f"{b} {figures[f'S,A {b}']['corrected']:.3f}" for b in BINNINGS)
                + f", Pearson {figures['pearson']:.2f}"
            )
            if arguments.output:
                write_report(arguments.output, vars(arguments), {"results": results})
    if arguments.table:
        arguments.table.write_text(markdown(results, arguments))


if __name__ == "__main__":
    main()
