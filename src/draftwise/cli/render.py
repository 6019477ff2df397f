"""Summaries of a run, as text and as JSON-serialisable data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftwise.benchmark.measure import Comparison, Run
from draftwise.cli.speculation_report import (
    describe_speculation,
    describe_stats,
    findings,
    losslessness,
    settings,
)
from draftwise.core.formats import MODEL_FREE_DRAFTS
from draftwise.llm import LLM
from draftwise.models.loading import LoadedModel
from draftwise.outputs import RequestOutput, TokenSource

STYLES = {
    TokenSource.DRAFT: "green",
    TokenSource.COPY: "magenta",
    TokenSource.CORRECTION: "bold yellow",
    TokenSource.BONUS: "bold cyan",
    TokenSource.TARGET: "",
}
# Names of the two ways to decode that are compared.
TARGET_ONLY, SPECULATIVE = "target only", "speculative"
# Columns of the longest bar.
_BAR = 40
_MEANINGS = {
    TokenSource.DRAFT: "drafted and accepted",
    TokenSource.COPY: "copied and accepted",
    TokenSource.CORRECTION: "the target's correction",
    TokenSource.BONUS: "bonus after a fully accepted draft",
    TokenSource.TARGET: "the target alone",
}


def show_summary(console: Console, llm: LLM, run: Run) -> None:
    """Print the summary of a run."""
    stats = run.stats
    console.print(_legend(run))
    table = _table(llm)
    table.add_row("generated", f"{run.num_tokens} tokens in {run.seconds:.2f} s")
    table.add_row("speed", f"[bold]{run.tokens_per_second:.1f}[/] tokens/s (prompts included)")
    if stats.num_verified:
        table.add_row("acceptance rate", f"{stats.acceptance_rate:.2f} of the verified tokens")
        table.add_row("accepted length", f"{stats.mean_accepted_length:.2f} tokens per step")
    for name, finding in findings(llm, stats).items():
        table.add_row(name, finding)
    table.add_row("output", losslessness(llm, stats))
    console.print(table)


def show_comparison(console: Console, llm: LLM, comparison: Comparison, batch_size: int) -> None:
    """Print a comparison of target-only and speculative decoding."""
    console.print(_legend(comparison.speculative))
    console.print(_table(llm))
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for name in ("tokens", "seconds", "tokens/s", "acceptance", "tokens/step"):
        table.add_column(name, justify="right")
    runs = {TARGET_ONLY: comparison.target_only, SPECULATIVE: comparison.speculative}
    for name, run in runs.items():
        stats = run.stats
        table.add_row(
            name,
            str(run.num_tokens),
            f"{run.seconds:.2f}",
            f"{run.tokens_per_second:.1f}",
            f"{stats.acceptance_rate:.2f}" if stats.num_verified else "–",
            f"{stats.mean_accepted_length:.2f}",
        )
    console.print(table)
    stats = comparison.speculative.stats
    for name, finding in findings(llm, stats).items():
        console.print(f"[dim]{name}:[/] {finding}")
    console.print(losslessness(llm, stats))
    console.print()
    console.print(_bars(runs))
    console.print()
    console.print(_verdict(llm, comparison, batch_size))


def describe(llm: LLM, run: Run, comparison: Comparison | None = None) -> dict[str, Any]:
    """A run as one JSON-serialisable object: settings, outputs and timing."""
    speculation = describe_speculation(llm, run.stats)
    result: dict[str, Any] = {
        "target": llm.target.name,
        "draft": llm.draft.name if llm.draft else None,
        "companion": llm.companion.name if llm.companion else None,
        "policy": speculation["policy"],
        "dtype": str(llm.target.model.dtype).removeprefix("torch."),
        "device": str(llm.target.model.device),
        "outputs": [_output(output) for output in run.outputs],
        "speculation": speculation,
        "timing": _timing(run),
    }
    if comparison is not None:
        result["compare"] = {
            "target_only": _timing(comparison.target_only),
            "speculative": _timing(comparison.speculative),
            "speedup": comparison.speedup,
            "num_identical": comparison.num_identical,
            "num_compared": comparison.num_compared,
            "num_prompts": len(run.outputs),
        }
    return result


def _output(output: RequestOutput) -> dict[str, Any]:
    result: dict[str, Any] = {
        "prompt": output.prompt,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason.value,
        "error": str(output.error) if output.error else None,
        "speculation": describe_stats(output.speculation),
    }
    if output.logprobs is not None:
        result["logprobs"] = [asdict(each) for each in output.logprobs]
    return result


def _timing(run: Run) -> dict[str, Any]:
    return {
        "seconds": run.seconds,
        "num_tokens": run.num_tokens,
        "tokens_per_second": run.tokens_per_second,
        "acceptance_rate": run.stats.acceptance_rate,
        "mean_accepted_length": run.stats.mean_accepted_length,
    }


def _legend(run: Run) -> Text:
    used = {source for output in run.outputs for source in output.token_sources}
    parts = [Text(_MEANINGS[s], style=STYLES[s]) for s in TokenSource if s in used]
    return Text(" · ").join(parts)


def _table(llm: LLM) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("target", _model(llm.target))
    drafts = [name for name in llm.draft_names if name in MODEL_FREE_DRAFTS]
    if llm.draft is not None:
        drafts.append(_model(llm.draft))
    if drafts:
        table.add_row("draft", ", ".join(drafts))
    if llm.companion is not None:
        table.add_row("companion", _model(llm.companion))
    if llm.speculation is not None:
        for name, setting in settings(llm.speculation).items():
            table.add_row(name, setting)
    return table


def _model(model: LoadedModel) -> str:
    native = model.model.native
    kind = str(model.model.dtype).removeprefix("torch.")
    if native is not None and native.has_quantized_weights:
        kind = "quantised"
    return f"{model.name} ({model.num_parameters / 1e6:.1f} M parameters, {kind})"


def _bars(runs: Mapping[str, Run]) -> Table:
    """A bar for the speed of each run."""
    fastest = max(run.tokens_per_second for run in runs.values())
    table = Table.grid(padding=(0, 2))
    for name, run in runs.items():
        bar = "━" * max(1, round(_BAR * run.tokens_per_second / fastest))
        table.add_row(name, Text(bar, style="green"), f"{run.tokens_per_second:.1f} tokens/s")
    return table


def _verdict(llm: LLM, comparison: Comparison, batch_size: int) -> str:
    speedup = comparison.speedup
    style = "bold green" if speedup >= 1 else "bold yellow"
    reason = "" if speedup >= 1 else " (drafts cost time here)"
    if speedup >= 1 and not comparison.speculative.stats.num_accepted:
        reason = " (no draft was accepted: this comes from other work on the machine)"
    return (
        f"[{style}]{speedup:.2f} times as fast[/]{reason} at batch size {batch_size}, and "
        f"{_equality(llm, comparison)}"
    )


def _equality(llm: LLM, comparison: Comparison) -> str:
    same, total = comparison.num_identical, comparison.num_compared
    if not comparison.speculative.stats.lossless:
        return f"{same} of {total} texts are identical"
    if not comparison.greedy:
        return "sampled texts differ, but their distribution is the same"
    if same == total:
        which = "both texts" if total == 1 else f"all {total} texts"
        return f"[bold]{which} are identical[/]"
    explanation = ""
    if llm.target.model.dtype != torch.float32:
        explanation = (
            "\n[dim]in low precision, rounding depends on the shape of a pass and can change the "
            "argmax of near-ties, with or without speculation; use --dtype float32 for an exact "
            "comparison[/]"
        )
    return f"{same} of {total} texts are identical{explanation}"
