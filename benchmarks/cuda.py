"""Speed-up of speculation and of CUDA graphs on a GPU, by batch size.

Target-only decoding, a fixed draft length, ``adaptive`` and ``sv`` run interleaved on the same
prompts, with CUDA graphs and, at some batch sizes, without. At small batch sizes,
``transformers.generate`` runs the same target for comparison.

    python benchmarks/cuda.py --target zoo:target@1500m --prompts gsm8k_test.jsonl

Prompts use the target's chat template. Every request generates ``--max-tokens`` tokens, and times
include prefill. The time outside the target is the step time without the target's forward pass and
without acceptance, which waits for that pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from draftwise import LLM, SamplingParams, SpeculationConfig
from draftwise.benchmark.measure import with_seeds
from draftwise.benchmark.report import write_report
from draftwise.benchmark.workload import chat_prompts
from draftwise.checkpoints.source import locate
from draftwise.models.static_steps import StepMode
from draftwise.outputs import SpeculationStats

_LONGEST_PROMPT = 256


@dataclass
class Cell:
    """Runs of one decoding mode at one batch size.

    Attributes:
        rates: tokens per second of each run.
        outside: fraction of each run's step time outside the target's pass.
        parts: seconds by part of a step, over all runs.
        stats: speculation statistics over all runs.
        texts: token ids of the last run's texts.
    """

    rates: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    texts: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def figures(self, alone: float | None) -> dict[str, object]:
        mean = self.stats.mean_accepted_length
        total = sum(self.parts.values())
        return {
            "tokens_per_second": self.rate,
            "runs": self.rates,
            "over_target_only": None if not alone else self.rate / alone,
            "accepted_length": mean,
            "acceptance_rate": self.stats.acceptance_rate,
            "outside_target": statistics.median(self.outside) if self.outside else None,
            "time_split": {k: v / total for k, v in self.parts.items()} if total else None,
        }


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], cell: Cell) -> None:
    """Generate once, step by step, and record times."""
    engine = llm.engine
    torch.cuda.synchronize()
    start = time.perf_counter()
    requests = [
        engine.add(None, prompt, each) for prompt, each in zip(prompts, params, strict=True)
    ]
    target = total = 0.0
    while engine.num_unfinished:
        engine.step()
        times = engine.times
        target += times.verify + times.accept
        total += times.total
        for part in ("draft", "companion", "select", "verify", "accept", "rest"):
            cell.parts[part] = cell.parts.get(part, 0.0) + getattr(times, part)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    outputs = [request.output() for request in requests]
    cell.rates.append(sum(len(output.token_ids) for output in outputs) / seconds)
    cell.outside.append(1 - target / total)
    for output in outputs:
        cell.stats.add(output.speculation)
    cell.texts = [output.token_ids for output in outputs]


def transformers_run(model: torch.nn.Module, prompts: list[list[int]], num_tokens: int) -> float:
    """Tokens per second of greedy ``transformers.generate`` on a batch."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in prompts], device="cuda")
    mask = torch.tensor(
        [[0] * (longest - len(each)) + [1] * len(each) for each in prompts], device="cuda"
    )
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=mask,
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    torch.cuda.synchronize()
    return len(prompts) * num_tokens / (time.perf_counter() - start)


def set_mode(llm: LLM, mode: StepMode) -> None:
    for model in (llm.target, llm.draft, llm.companion):
        if model is not None:
            model.model.step_mode = mode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:target@1500m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--companion", default="zoo:companion")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--eager-batch-sizes", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--transformers-batch-sizes", type=int, nargs="*", default=[1, 8])
    parser.add_argument(
        "--policies",
        nargs="+",
        default=["fixed", "adaptive", "sv"],
        help="names of policies, each with its own drafts where @DRAFT+DRAFT follows",
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-chunk-tokens", type=int, default=2048)
    parser.add_argument("--warm-ups", type=int, default=3, help="untimed rounds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="time limit for starting a batch size")
    parser.add_argument("--output", type=Path, help="also write the figures as JSON")
    arguments = parser.parse_args()
    begin = time.perf_counter()

    most = max(arguments.batch_sizes)
    base = LLM(
        arguments.target,
        None,
        dtype="bfloat16",
        device="cuda",
        max_batch_size=most,
        max_model_len=arguments.max_model_len,
        max_chunk_tokens=arguments.max_chunk_tokens,
        enable_prefix_caching=False,
    )
    engines = {"target only": base}
    for contender in arguments.policies:
        policy, _, draft = contender.partition("@")
        engines[contender] = base.with_speculation(
            SpeculationConfig(
                tuple(draft.split("+")) if draft else arguments.draft,
                arguments.companion if policy == "sv" else None,
                policy=policy,
                num_speculative_tokens=arguments.num_speculative_tokens,
            )
        )
    prompts = chat_prompts(base, [arguments.prompts], most, _LONGEST_PROMPT)
    console = Console(width=120)
    console.print(f"{base.target.num_parameters:,} parameters; loaded, {len(prompts)} prompts")
    peer_model = AutoModelForCausalLM.from_pretrained(
        locate(arguments.target, "target"), dtype=torch.bfloat16
    )
    peer_model.eval().to("cuda")

    params = SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        ignore_eos=True,
        seed=0,
    )
    figures: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "transformers": transformers.__version__,
        "num_parameters": base.target.num_parameters,
        "batch_sizes": {},
    }

    def write() -> None:
        torch_bytes = torch.cuda.max_memory_allocated()
        figures["peak_memory_gib"] = round(torch_bytes / 2**30, 1)
        if arguments.output:
            write_report(arguments.output, vars(arguments), figures)

    for batch_size in arguments.batch_sizes:
        if arguments.seconds and time.perf_counter() - begin > arguments.seconds:
            break
        part = prompts[:batch_size]
        seeded = with_seeds(params, len(part))
        modes = [StepMode.GRAPHS]
        if batch_size in arguments.eager_batch_sizes:
            modes.append(StepMode.EAGER)
        turns = [(name, mode) for mode in modes for name in engines]
        cells = {turn: Cell() for turn in turns}
        peer = Cell()
        for repeat in range(-arguments.warm_ups, arguments.repeats):
            for name, mode in turns if repeat % 2 else turns[::-1]:
                set_mode(engines[name], mode)
                # The warm-up rounds capture graphs and let policies learn. They are not counted.
                if repeat >= -1 or mode is StepMode.GRAPHS:
                    cell = Cell() if repeat < 0 else cells[name, mode]
                    run(engines[name], part, seeded, cell)
            if repeat >= -1 and batch_size in arguments.transformers_batch_sizes:
                rate = transformers_run(peer_model, part, arguments.max_tokens)
                if repeat >= 0:
                    peer.rates.append(rate)
        table = Table(title=f"{arguments.target}, batch {batch_size}")
        for column in ("", "tokens/s", "ratio", "accepted", "outside target", "identical"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        rows: dict[str, object] = {}
        reference = cells["target only", StepMode.GRAPHS]
        for (name, mode), cell in cells.items():
            alone = cells["target only", mode].rate
            same = sum(a == b for a, b in zip(cell.texts, reference.texts, strict=True))
            label = name if mode is StepMode.GRAPHS else f"{name}, eager"
            rows[label] = cell.figures(alone) | {"same_texts": same}
            table.add_row(
                label,
                f"{cell.rate:.0f}",
                f"{cell.rate / alone:.2f}",
                f"{cell.stats.mean_accepted_length:.2f}",
                f"{statistics.median(cell.outside):.2f}",
                f"{same}/{len(part)}",
            )
        if peer.rates:
            rows["transformers"] = peer.figures(reference.rate)
            table.add_row(
                "transformers", f"{peer.rate:.0f}", f"{peer.rate / reference.rate:.2f}", "", "", ""
            )
        console.print(table)
        figures["batch_sizes"][str(batch_size)] = rows  # type: ignore[index]
        write()


if __name__ == "__main__":
    main()
