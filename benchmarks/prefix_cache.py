"""Requests with a common beginning, with and without prefix caching.

    python benchmarks/prefix_cache.py --target TARGET --prompts gsm8k_test.jsonl \
        --output benchmarks/results/prefix_cache.json

Each request consists of the same examples and a question of its own. Both settings answer all
requests in turns, and find nothing of an earlier turn. Printed are medians of the time to the first
token, over all requests, and of the whole time, and their ratios. In float32, the texts are
compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from draftwise import LLM, SamplingParams
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import load_workload
from draftwise.engine.request import Request

SWITCHES = {"cached": True, "computed": False}


def shared_prefix(questions: list[list[int]], length: int) -> list[int]:
    """The first tokens of the questions one after another."""
    tokens = [token for question in questions for token in question]
    assert len(tokens) >= length
    return tokens[:length]


def run(
    llm: LLM, prompts: list[list[int]], params: SamplingParams
) -> tuple[float, float, list[list[int]]]:
    """Median time to the first token, whole time, and texts."""
    first: dict[int, float] = {}
    start = time.perf_counter()

    def note(advanced: list[Request]) -> None:
        now = time.perf_counter() - start
        for request in advanced:
            first.setdefault(request.request_id, now)

    outputs = llm.generate(prompts, params, on_step=note)
    whole = time.perf_counter() - start
    return statistics.median(first.values()), whole, [each.token_ids for each in outputs]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--prefix-tokens", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    speculation = None
    if arguments.draft is not None:
        speculation = {"draft": arguments.draft, "policy": "fixed", "num_speculative_tokens": 3}
    llms = {
        name: LLM(
            arguments.target,
            speculation,
            arguments.dtype,
            max_batch_size=arguments.batch_size,
            max_model_len=1024 if arguments.prefix_tokens < 700 else None,
            enable_prefix_caching=switch,
        )
        for name, switch in SWITCHES.items()
    }
    any_llm = llms["cached"]
    needed = arguments.num_requests + 20
    questions = load_workload(any_llm, arguments.prompts, needed, 200, False).prompts
    prefix = shared_prefix(questions[arguments.num_requests :], arguments.prefix_tokens)
    prompts = [[*prefix, *question] for question in questions[: arguments.num_requests]]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in llms}
    texts: dict[str, list[list[int]]] = {}
    for turn in range(arguments.turns + 1):
        params = SamplingParams(
            temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True, cache_salt=str(turn)
        )
        for name, llm in llms.items():
            *seconds, texts[name] = run(llm, prompts, params)
            if turn:
                times[name].append((seconds[0], seconds[1]))
        if arguments.dtype == "float32" and texts["cached"] != texts["computed"]:
            raise SystemExit("the texts differ")
    table = Table(
        title=f"{arguments.num_requests} requests, {arguments.prefix_tokens} tokens alike"
    )
    for header in ("", "first token (s)", "all (s)"):
        table.add_column(header, justify="right")
    medians = {
        name: [statistics.median(column) for column in zip(*turns, strict=True)]
        for name, turns in times.items()
    }
    for name, (first, whole) in medians.items():
        table.add_row(name, f"{first:.3f}", f"{whole:.3f}")
    ratios = [
        statistics.median(c[at] / p[at] for c, p in zip(*times.values(), strict=True))
        for at in (0, 1)
    ]
    table.add_row("ratio", *(f"{ratio:.3f}" for ratio in ratios))
    Console().print(table)
    if arguments.output:
        figures = {"seconds": medians, "ratios": ratios, "turns": times}
        write_report(arguments.output, vars(arguments), figures)


if __name__ == "__main__":
    main()
