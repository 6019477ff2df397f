"""Resident memory over many short requests to one LLM, which should remain constant.

    python benchmarks/memory.py --target zoo:target@200m --num-requests 2000

The prefix cache grows until it is full. A short --max-model-len makes it small, so that it is full
after the warm-up.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

from draftwise import LLM, SamplingParams, SpeculationConfig

_PAGE_BYTES = 4096


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES / 2**20


def run(llm: LLM, params: SamplingParams, first: int, count: int) -> None:
    """Answer prompts that no other run has."""
    llm.generate([f"def function_{first + i}(value):" for i in range(count)], params)
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--warm-up", type=int, default=1500, help="requests before the first look")
    parser.add_argument("--max-model-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    arguments = parser.parse_args()

    llm = LLM(
        arguments.target,
        SpeculationConfig(draft=arguments.draft, num_speculative_tokens=4, policy="fixed"),
        max_batch_size=arguments.batch_size,
        max_model_len=arguments.max_model_len,
    )
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=1.0)
    part = max(arguments.num_requests // 10, 1)
    run(llm, params, 0, arguments.warm_up)
    first = resident_mib()
    print(f"{arguments.warm_up:6d} requests  {first:8.1f} MiB")
    for done in range(arguments.warm_up, arguments.warm_up + arguments.num_requests, part):
        run(llm, params, done, part)
        now = resident_mib()
        print(f"{done + part:6d} requests  {now:8.1f} MiB  {now / first - 1:+.2%}")


if __name__ == "__main__":
    main()
