"""``draftwise profile``: measure the acceptance of a draft and write a profile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftwise.cli.defaults import Zoo, choose_models
from draftwise.cli.fields import Values, takes
from draftwise.cli.flags import name_flags
from draftwise.cli.options import (
    COMPANION_HELP,
    LOADING_OPTIONS,
    MODELS,
    RUNNING,
    SAMPLING_OPTIONS,
    Draft,
    Target,
)
from draftwise.errors import DraftwiseError, InvalidParameterError
from draftwise.params import SamplingParams

if TYPE_CHECKING:
    from draftwise.engine.assembly import Models
    from draftwise.estimators.profile import AcceptanceProfile
    from draftwise.llm import LLM
    from draftwise.profiling.acceptance import Collection
    from draftwise.prompts import Prompt


@takes(
    sampling=SAMPLING_OPTIONS.without("structured_outputs", "logprobs").but(
        temperature=1.0, seed=0
    ),
    engine=LOADING_OPTIONS,
)
def profile(
    context: typer.Context,
    *,
    prompts: Annotated[
        Path,
        typer.Option(help="JSON lines with prompt, question, turns or text.", metavar="FILE"),
    ],
    num_prompts: Annotated[
        int, typer.Option(help="Maximum number of prompts read from the file.", min=1)
    ] = 512,
    chat: Annotated[
        bool, typer.Option("--chat", help="Format prompts with the target's chat template.")
    ] = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Profile to write.", metavar="FILE")
    ] = Path("profile.safetensors"),
    target: Target = None,
    draft: Draft = None,
    companion: Annotated[
        str | None,
        typer.Option(
            help=f"{COMPANION_HELP} Without a companion, only signals of the draft are profiled.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Number of tokens drafted per step.", min=1, rich_help_panel=MODELS)
    ] = 8,
    sampling: SamplingParams,
    batch_size: Annotated[
        int,
        typer.Option(help="Number of prompts that run at once.", min=1, rich_help_panel=RUNNING),
    ] = 16,
    engine: Values,
) -> None:
    """Measure how acceptance depends on signals of the draft and the companion.

    Runs speculative decoding with a fixed draft length over the prompts. An interrupted run is
    resumed by running the same command again. Use prompts and sampling parameters that are
    representative of those to be served.

    Examples:
      draftwise profile --prompts prompts.jsonl -o profile.safetensors
      draftwise profile --prompts prompts.jsonl --companion zoo:companion --temperature 0
    """
    from draftwise.prompts import load_prompts
    from draftwise.speculation import SpeculationConfig

    if output.is_dir() or not output.absolute().parent.is_dir():
        raise InvalidParameterError("output", f"cannot write a file at {str(output)!r}")
    models = choose_models(Zoo(), target, draft, companion)
    draft_name = models.require_draft_model("a profile is about the acceptance of a draft")
    texts = load_prompts(prompts, num_prompts)
    speculation = SpeculationConfig(
        draft=draft_name,
        companion=models.companion,
        policy="fixed",
        num_speculative_tokens=num_speculative_tokens,
    )
    console = Console(highlight=False)
    with console.status(f"loading {models.target}, {draft_name} …"):
        from draftwise.llm import LLM

        llm = LLM(models.target, None, max_batch_size=1, **engine)
        loaded = llm.load_models(speculation)
    inputs: list[Prompt] = [[{"role": "user", "content": text}] if chat else text for text in texts]
    rename = partial(name_flags, context.command)
    _profile(
        console, llm, loaded, inputs, sampling, num_speculative_tokens, batch_size, output, rename
    )


def _profile(
    console: Console,
    llm: LLM,
    models: Models,
    prompts: list[Prompt],
    sampling: SamplingParams,
    num_speculative_tokens: int,
    batch_size: int,
    output: Path,
    rename: Callable[[DraftwiseError], None],
) -> None:
    from draftwise.cli.live import progress
    from draftwise.estimators.profile import fit_profile
    from draftwise.profiling.acceptance import collect

    partial = output.with_name(output.name.removesuffix(".safetensors") + ".partial.safetensors")
    ids = [llm.tokenize(prompt) for prompt in prompts]
    with progress(console, "profiling", len(prompts)) as on_step:
        collection = collect(
            models,
            ids,
            sampling,
            num_speculative_tokens=num_speculative_tokens,
            batch_size=batch_size,
            checkpoint=partial,
            on_step=on_step,
        )
    with console.status("fitting …"):
        profile = fit_profile(collection.records, collection.provenance)
    profile.save(output)
    partial.unlink(missing_ok=True)
    for error in collection.errors:
        rename(error)
    _show(console, models, collection, profile)
    console.print(f"written to {output}", soft_wrap=True)


def _show(
    console: Console, models: Models, collection: Collection, profile: AcceptanceProfile
) -> None:
    summary = profile.summary
    assert summary is not None
    if collection.num_resumed:
        console.print(f"resumed after {collection.num_resumed} prompts", style="dim")
    if collection.errors:
        console.print(
            f"[bold yellow]{len(collection.errors)} prompts were skipped[/]; first error: "
            f"{collection.errors[0]}"
        )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    for role in ("target", "draft", "companion"):
        model = getattr(models, role)
        if model is not None:
            table.add_row(role, f"{model.name} [dim]{model.fingerprint}[/]")
    table.add_row(
        "records",
        f"{summary.num_tokens} drafted tokens in {summary.num_chains} drafts "
        f"of {collection.num_prompts} prompts",
    )
    table.add_row("acceptance probability", f"[bold]{summary.mean_acceptance:.3f}[/] mean")
    by_position = " ".join(f"{p:.2f}" for p in summary.acceptance_by_position)
    table.add_row("by position", by_position)
    console.print(table)
    console.print(_gain_table(profile))


def _gain_table(profile: AcceptanceProfile) -> Table:
    """Information gain of each signal in bits, and calibration error of each table."""
    summary = profile.summary
    assert summary is not None
    (entropy, *_) = (gain.entropy for gain in summary.gains.values())
    (fate_entropy, *_) = (gain.entropy for gain in summary.fate_gains.values())
    table = Table(
        box=None,
        pad_edge=False,
        header_style="dim",
        title="information gain in bits (dimmed: corrected for chance)",
        title_justify="left",
    )
    for name in (
        "signal",
        "cells",
        f"accepted or not, of {entropy:.2f}",
        f"acceptance probability, of {fate_entropy:.2f}",
        "calibration error",
    ):
        table.add_column(name, justify="left" if name == "signal" else "right")
    for signal, gain in summary.gains.items():
        fate = summary.fate_gains[signal]
        binning = signal.removeprefix("S,A ")
        is_table = binning in profile.tables
        table.add_row(
            signal,
            str(profile.tables[binning].num_cells if is_table else gain.num_cells),
            f"{gain.plain:.3f} [dim]{gain.corrected:.3f}[/]",
            f"{fate.plain:.3f} [dim]{fate.corrected:.3f}[/]",
            f"{summary.calibration_errors[binning]:.3f}" if is_table else "",
        )
    return table
