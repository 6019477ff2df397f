"""vLLM without speculation, with its own speculation, and controlled by Draftwise, interleaved.

    python benchmarks/in_vllm.py --vllm /opt/vllm/bin/python --prompts gsm8k_test.jsonl
    python benchmarks/in_vllm.py --vllm /opt/vllm/bin/python --prompts gsm8k_test.jsonl \
        --target TARGET --contenders "vllm ngram 8" "vllm suffix" "vllm-draftwise suffix 8"
    python benchmarks/in_vllm.py --vllm /opt/vllm/bin/python --prompts gsm8k_test.jsonl \
        --head zoo:eagle3@200m --contenders "vllm eagle3 5"

The environment of that interpreter must have vLLM and Draftwise, and vLLM's ``suffix`` also needs
arctic-inference. Each engine runs in its own process, which is paused between its turns. The report
has tokens per second relative to target-only decoding, as median and range over rounds, and vLLM's
counts of verified and accepted tokens. vLLM does not count steps without a draft, so the number of
steps is computed from the number of tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftwise import LLM, SamplingParams
from draftwise.benchmark.contenders import Turn
from draftwise.benchmark.peer_modes import modes_of
from draftwise.benchmark.peers import Peer, PeerModels
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import load_workload
from draftwise.checkpoints.source import locate

BASELINE = "vllm"


def contest(arguments: argparse.Namespace, models: PeerModels) -> list[Peer]:
    """The contenders that the arguments name, and the baseline."""
    made = {}
    for engine in ("vllm", "vllm-draftwise"):
        for mode in modes_of(engine, True, [arguments.text_tokens], models.head is not None):
            log = arguments.logs / f"{engine}{mode.label}.log"
            peer = Peer(engine, mode, arguments.vllm, models, log)
            made[peer.name] = peer
    unknown = set(arguments.contenders) - made.keys()
    if unknown:
        raise SystemExit(f"unknown contenders {sorted(unknown)}; known are {sorted(made)}")
    return [made[name] for name in dict.fromkeys([BASELINE, *arguments.contenders])]


def figures(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Figures of one batch size by contender."""
    result = {}
    for name, own in turns.items():
        ratios = [
            (turn.num_tokens / turn.seconds) / (base.num_tokens / base.seconds)
            for turn, base in zip(own, turns[BASELINE], strict=True)
        ]
        counts = {key: sum(turn.counts.get(key, 0) for turn in own) for key in own[0].counts}
        # Each step of a request gains one token more than it accepts.
        tokens = sum(turn.num_tokens for turn in own)
        steps = tokens - counts.get("accepted_tokens", 0)
        result[name] = {
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "tokens_per_second": tokens / sum(turn.seconds for turn in own),
            "tokens_per_request_step": tokens / steps,
            "sent_per_request_step": counts.get("draft_tokens", 0) / steps,
            "counts": counts,
        }
    return result


def show(console: Console, title: str, found: dict[str, Any]) -> None:
    table = Table(title=title)
    for name in ("engine", "tokens/s", "× target only", "range", "tokens/step", "verified/step"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    table.add_column("accepted / verified", justify="right")
    for name, each in found.items():
        counts = each["counts"]
        sent = counts.get("draft_tokens", 0)
        table.add_row(
            name,
            f"{each['tokens_per_second']:.1f}",
            f"{each['ratio']:.2f}",
            f"{min(each['ratios']):.2f}–{max(each['ratios']):.2f}",
            f"{each['tokens_per_request_step']:.2f}",
            f"{each['sent_per_request_step']:.2f}",
            f"{counts['accepted_tokens'] / sent:.2f}" if sent else "",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, help="interpreter of the environment")
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--companion", default="zoo:companion")
    parser.add_argument("--head", help="EAGLE-3 head, for vLLM's method eagle3")
    parser.add_argument("--contenders", nargs="+", default=["vllm draft 5", "vllm-draftwise"])
    parser.add_argument("--text-tokens", type=int, default=8, help="longest draft without a model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--longest-prompt", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up-rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--logs", type=Path, default=Path("logs"))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    console = Console(width=110)
    llm = LLM(arguments.target, dtype=arguments.dtype, max_batch_size=1, max_model_len=64)
    has_template = getattr(llm.target.tokenizer, "chat_template", None) is not None
    workload = load_workload(
        llm, arguments.prompts, 1_000_000, arguments.longest_prompt, chat=has_template
    )
    prompts = workload.prompts
    random.Random(0).shuffle(prompts)
    prompts = prompts[: arguments.num_prompts]
    device = llm.target.model.device.type
    del llm
    models = PeerModels(
        locate(arguments.target, "target"),
        locate(arguments.draft, "draft"),
        arguments.dtype,
        arguments.threads,
        arguments.longest_prompt + arguments.max_tokens,
        max(arguments.batch_sizes),
        locate(arguments.companion, "companion"),
        device=device,
        head=arguments.head and locate(arguments.head, "draft"),
    )
    contenders = contest(arguments, models)
    params = SamplingParams(
        max_tokens=arguments.max_tokens, temperature=arguments.temperature, ignore_eos=True
    )
    results: dict[str, Any] = {}
    shuffle = random.Random(0)
    try:
        for size in arguments.batch_sizes:
            turns: dict[str, list[Turn]] = {peer.name: [] for peer in contenders}
            for number in range(arguments.warm_up_rounds + arguments.rounds):
                start = number * size
                batch = [prompts[(start + i) % len(prompts)] for i in range(size)]
                shuffle.shuffle(contenders)
                for peer in contenders:
                    turn = peer.generate(batch, [params] * size)
                    if number >= arguments.warm_up_rounds:
                        turns[peer.name].append(turn)
            ordered = {name: turns[name] for name in sorted(turns)}
            results[str(size)] = figures(ordered)
            show(console, f"{arguments.prompts.stem}, batch {size}", results[str(size)])
            if arguments.output:
                write_report(arguments.output, vars(arguments), {"results": results})
    finally:
        for peer in contenders:
            peer.close()


if __name__ == "__main__":
    main()
