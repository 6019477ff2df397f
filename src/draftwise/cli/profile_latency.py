"""``draftwise profile-latency``: what passes of the models cost on this machine, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from draftwise.cli.defaults import ChosenModels, Zoo, choose_models
from draftwise.cli.options import parse_numbers, set_threads
from draftwise.cli.shared import Draft, MaxModelLen, Target, TrustRemoteCode
from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.engine.assembly import Models
    from draftwise.profiling.latency_profile import LatencyProfile
    from draftwise.profiling.passes import Stage

# How many tokens more the closing sentence is about.
_MORE = 4


def profile_latency(
    target: Target = None,
    draft: Draft = None,
    companion: Annotated[
        str | None, typer.Option(help="The model that judges; draft:int8 is the draft quantised.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    max_batch_size: Annotated[int, typer.Option(help="Largest batch.")] = 32,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Most tokens verified per request and step.")
    ] = 5,
    contexts: Annotated[
        str | None,
        typer.Option(
            help="Tokens of context, separated by commas; 128,512,1024 as far as they fit."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads to compute with; PyTorch's default if left out.")
    ] = None,
    interference: Annotated[
        bool,
        typer.Option(
            "--interference",
            help="Also measure how target and draft slow each other down at the same time.",
        ),
    ] = False,
    max_model_len: MaxModelLen = None,
    trust_remote_code: TrustRemoteCode = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", metavar="FILE")
    ] = Path("latency.json"),
) -> None:
    """Measure what passes of the models cost on this machine.

    A profile holds for these models, this type, this machine and as many threads. Measure on a
    machine that does nothing else.

    Examples:
      draftwise profile-latency -o latency.json
      draftwise profile-latency --contexts 128,2048 --threads 8 -o latency.json
    """
    lengths = None if contexts is None else parse_numbers("contexts", contexts)
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise InvalidParameterError("output", f"cannot write a file at {str(output)!r}")
    models = choose_models(Zoo(), target, draft, companion)
    if interference:
        models.require_draft("--interference is that of target and draft")
    if models.companion is not None:
        models.require_draft("--companion judges one")
    if models.draft_is_missing:
        typer.echo("no draft: the target alone is measured; name one with --draft DRAFT", err=True)
    if threads is not None:
        set_threads(threads)
    console = Console(highlight=False)
    loaded = _load(console, models, dtype, device, max_model_len, trust_remote_code)

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


def _load(
    console: Console,
    models: ChosenModels,
    dtype: str,
    device: str,
    max_model_len: int | None,
    trust_remote_code: bool,
) -> Models:
    with console.status("loading the models …"):
        from draftwise.engine.assembly import Models
        from draftwise.llm import LLM
        from draftwise.params import SpeculationConfig

        llm = LLM(
            models.target,
            None,
            dtype=dtype,
            device=device,
            max_batch_size=1,
            max_model_len=max_model_len,
            trust_remote_code=trust_remote_code,
        )
        if models.draft is None:
            return Models(llm.target)
        speculation = SpeculationConfig(models.draft, companion=models.companion, policy="fixed")
        return llm.load_models(speculation)


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
    for stage, what in ((Stage.DRAFT, "requests"), (Stage.COMPANION, "tokens judged")):
        if stage in profile.costs:
            console.print(f"[bold]{stage}[/], ms per pass")
            console.print(_curve_table(profile, stage, what))
    for stage, factor in profile.interference.items():
        console.print(
            f"target and draft at the same time: the {stage} takes {factor:.2f} times as long"
        )
    console.print(_meaning(profile, context))


def _target_table(profile: LatencyProfile, context: int) -> Table:
    """Milliseconds by tokens per request and batch size."""
    from draftwise.profiling.passes import Stage

    cells = {
        (p.shape.num_requests, p.shape.num_tokens // p.shape.num_requests): p.seconds
        for p in profile.points
        if p.stage is Stage.TARGET and p.shape.context == context
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


def _curve_table(profile: LatencyProfile, stage: Stage, what: str) -> Table:
    """Milliseconds of a small model, as fitted."""
    cost = profile.costs[stage]
    table = Table(box=None, header_style="dim")
    table.add_column(what, justify="right")
    table.add_column("ms", justify="right")
    for tokens, seconds in zip(cost.tokens, cost.seconds, strict=True):
        table.add_row(f"{tokens:.0f}", f"{1000 * seconds:.2f}")
    return table


def _meaning(profile: LatencyProfile, context: int) -> str:
    """What the profile says about speculation, in a sentence."""
    from draftwise.profiling.passes import Stage

    cost = profile.costs[Stage.TARGET]
    points = [point for point in profile.points if point.stage is Stage.TARGET]

    def more(batch: int) -> str:
        one = cost(batch, batch * context)
        extra = cost(batch * (1 + _MORE), batch * context) / one - 1
        return f"{100 * extra:.0f} % of a target-only pass at batch {batch}"

    largest = max(point.shape.num_requests for point in points)
    batches = [1] if largest == 1 else [1, largest]
    return f"Verifying {_MORE} tokens more per request costs {' and '.join(map(more, batches))}."
