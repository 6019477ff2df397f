"""``draftwise profile-latency``: measure latencies of forward passes and write a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from draftwise.cli.defaults import ChosenModels, Zoo, choose_models
from draftwise.cli.fields import Values, takes
from draftwise.cli.option_values import parse_numbers, set_threads
from draftwise.cli.options import LOADING_OPTIONS, Companion, Draft, Target
from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.engine.assembly import Models
    from draftwise.profiling.latency_profile import LatencyProfile
    from draftwise.profiling.passes import Stage

# Number of additional tokens per request in the closing sentence.
_NUM_EXTRA_TOKENS = 4


@takes(engine=LOADING_OPTIONS)
def profile_latency(
    *,
    target: Target = None,
    draft: Draft = None,
    companion: Companion = None,
    max_batch_size: Annotated[int, typer.Option(help="Largest batch size.")] = 32,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Maximum number of tokens verified per request and step.")
    ] = 5,
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Context lengths in tokens, separated by commas.",
            show_default="those of 128,512,1024 that fit",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Number of CPU threads.", show_default="PyTorch's default"),
    ] = None,
    interference: Annotated[
        bool,
        typer.Option(
            "--interference",
            help="Also measure how much target and draft slow each other down when they run at "
            "the same time.",
        ),
    ] = False,
    engine: Values,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Profile to write.", metavar="FILE")
    ] = Path("latency.json"),
) -> None:
    """Measure the latency of forward passes of the models on this machine.

    A profile is valid only for the same models, data type, machine and number of threads. Measure
    on an otherwise idle machine.

    Examples:
      draftwise profile-latency -o latency.json
      draftwise profile-latency --contexts 128,2048 --threads 8 -o latency.json
    """
    lengths = None if contexts is None else parse_numbers("contexts", contexts)
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise InvalidParameterError("output", f"cannot write a file at {str(output)!r}")
    models = choose_models(Zoo(), target, draft, companion)
    if interference:
        models.require_draft_model("--interference needs a draft")
    if models.companion is not None:
        models.require_draft_model("--companion needs a draft")
    if models.draft_is_missing:
        typer.echo(
            "no draft: only the target is measured; name a draft with --draft DRAFT", err=True
        )
    if threads is not None:
        set_threads(threads)
    console = Console(highlight=False)
    loaded = _load(console, models, engine)

    from draftwise.profiling.latency import measure_profile

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("passes"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("measuring", total=None)
        profile = measure_profile(
            loaded,
            max_batch_size,
            lengths,
            num_speculative_tokens,
            interference,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    profile.save(output)
    _show(console, profile)
    console.print(f"written to {output}", soft_wrap=True)


def _load(console: Console, models: ChosenModels, engine: Values) -> Models:
    with console.status("loading the models …"):
        from draftwise.engine.assembly import Models
        from draftwise.llm import LLM
        from draftwise.speculation import SpeculationConfig

        llm = LLM(models.target, None, max_batch_size=1, **engine)
        if models.draft is None:
            return Models(llm.target)
        return llm.load_models(
            SpeculationConfig(models.draft, companion=models.companion, policy="fixed")
        )


def _show(console: Console, profile: LatencyProfile) -> None:
    from draftwise.profiling.passes import Stage

    machine = profile.machine
    console.print(
        f"{machine['processor']}, {machine['device']}, {machine['threads']} threads, "
        f"{machine['dtype']}",
        style="dim",
    )
    context = min(p.shape.context for p in profile.points if p.stage is Stage.TARGET)
    console.print(f"[bold]target[/], ms per pass with {context} tokens of context")
    console.print(_target_table(profile, context))
    for stage, unit in ((Stage.DRAFT, "requests"), (Stage.COMPANION, "scored tokens")):
        if stage in profile.costs:
            console.print(f"[bold]{stage}[/], ms per pass")
            console.print(_curve_table(profile, stage, unit))
            extra = profile.costs[stage].first_extra
            if extra:
                console.print(f"the first pass of a step takes {1000 * extra:.2f} ms more")
    for stage, factor in profile.interference.items():
        console.print(
            f"target and draft at the same time: the {stage} takes {factor:.2f} times as long"
        )
    console.print(_conclusion(profile, context))


def _target_table(profile: LatencyProfile, context: int) -> Table:
    """Milliseconds per target pass, by tokens per request and batch size."""
    from draftwise.profiling.passes import Stage

    cells = {
        (p.shape.num_requests, p.shape.num_tokens // p.shape.num_requests): p.seconds
        for p in profile.points
        if p.stage is Stage.TARGET
        and p.shape.context == context
        and p.shape.num_tokens % p.shape.num_requests == 0
    }
    batches = sorted({batch for batch, _ in cells})
    table = Table(box=None, header_style="dim")
    table.add_column("tokens per request", justify="right")
    for batch in batches:
        table.add_column(f"batch {batch}", justify="right")
    for tokens in sorted({tokens for _, tokens in cells}):
        row = (cells.get((batch, tokens)) for batch in batches)
        table.add_row(str(tokens), *("" if s is None else f"{1000 * s:.2f}" for s in row))
    return table


def _curve_table(profile: LatencyProfile, stage: Stage, unit: str) -> Table:
    """Fitted milliseconds per pass of the draft or the companion, by number of ``unit``."""
    cost = profile.costs[stage]
    table = Table(box=None, header_style="dim")
    table.add_column(unit, justify="right")
    table.add_column("ms", justify="right")
    for tokens, seconds in zip(cost.tokens, cost.seconds, strict=True):
        table.add_row(f"{tokens:.0f}", f"{1000 * seconds:.2f}")
    return table


def _conclusion(profile: LatencyProfile, context: int) -> str:
    """One sentence about the cost of verifying additional tokens."""
    from draftwise.profiling.passes import Stage

    cost = profile.costs[Stage.TARGET]
    points = [point for point in profile.points if point.stage is Stage.TARGET]

    def extra_cost(batch: int) -> str:
        one = cost(batch, batch * context)
        extra = cost(batch * (1 + _NUM_EXTRA_TOKENS), batch * context) / one - 1
        return f"{100 * extra:.0f} % of a target-only pass at batch {batch}"

    largest = max(point.shape.num_requests for point in points)
    batches = [1] if largest == 1 else [1, largest]
    costs = " and ".join(map(extra_cost, batches))
    return f"Verifying {_NUM_EXTRA_TOKENS} more tokens per request costs {costs}."
