"""``draftwise study``: reproduce tables and figures of the papers for any models."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftwise.cli.defaults import Zoo, choose_models
from draftwise.cli.fields import Values, takes
from draftwise.cli.option_values import make_folder, parse_numbers, set_threads
from draftwise.cli.options import (
    COMPANION_HELP,
    LOADING_OPTIONS,
    MODELS,
    RUNNING,
    SAMPLING_OPTIONS,
    TARGET_HELP,
    Draft,
)
from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.studies.settings import StudySettings
    from draftwise.studies.study import Description, Study

_WORKLOAD, _TIMED, _SIGNALS = "Workload", "Timed studies", "Study signals"
_ALL = "all"
_ZOO = Zoo(
    "zoo:target@200m",
    "zoo:draft",
    "zoo:companion",
    ("zoo:draft", "zoo:companion"),
)


@takes(sampling=SAMPLING_OPTIONS.only("top_p"), engine=LOADING_OPTIONS)
def study(
    *,
    names: Annotated[
        list[str],
        typer.Argument(help="Names of studies, or all; list prints the names.", metavar="NAME..."),
    ],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines with prompt, question, turns or text; may be repeated.",
            metavar="FILE",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the results.", metavar="DIR")
    ] = Path("studies"),
    target: Annotated[
        str | None,
        typer.Option(
            help=f"{TARGET_HELP} Untimed studies of an inflated model use its original.",
            show_default=_ZOO.target,
            rich_help_panel=MODELS,
        ),
    ] = None,
    draft: Draft = None,
    companion: Annotated[
        str | None,
        typer.Option(
            help=COMPANION_HELP,
            show_default="zoo:companion with a target of the zoo",
            rich_help_panel=MODELS,
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help="Further companions of the study signals, separated by commas. The study "
            "cost-ratio inflates them too.",
            show_default="those of the zoo with a target of the zoo, otherwise draft and companion",
            rich_help_panel=MODELS,
        ),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            help="EAGLE head of the target that the study goodput compares with the draft.",
            rich_help_panel=MODELS,
        ),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(help="Number of prompts per task.", rich_help_panel=_WORKLOAD)
    ] = 8,
    longest_prompt: Annotated[
        int,
        typer.Option(
            help="Maximum number of prompt tokens; longer prompts are skipped.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = 300,
    max_tokens: Annotated[
        int,
        typer.Option(
            help="Maximum number of tokens generated per prompt.", rich_help_panel=_WORKLOAD
        ),
    ] = 64,
    long_text: Annotated[
        int, typer.Option(help="Number of tokens of a long text.", rich_help_panel=_WORKLOAD)
    ] = 384,
    num_speculative_tokens: Annotated[
        int,
        typer.Option(help="Maximum number of tokens drafted per step.", rich_help_panel=_WORKLOAD),
    ] = 5,
    temperature: Annotated[
        float,
        typer.Option(help="Temperature of all models, above 0.", rich_help_panel=_WORKLOAD),
    ] = 1.0,
    sampling: Values,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Do not use the chat template.", rich_help_panel=_WORKLOAD),
    ] = False,
    samplings: Annotated[
        str,
        typer.Option(
            help="TEMPERATURE[:TOP_P[:TOP_K]], separated by commas; of the study signals.",
            rich_help_panel=_SIGNALS,
        ),
    ] = "0,0.7:0.8:20,1",
    recordings: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps recorded drafts. An interrupted study goes on from there, and "
            "another one with the same models and prompts reads them.",
            metavar="DIR",
            rich_help_panel=_SIGNALS,
        ),
    ] = None,
    pass_times: Annotated[
        Path | None,
        typer.Option(
            help="File of pass times. It is written if it does not exist.",
            metavar="FILE",
            show_default="measured, and not kept",
            rich_help_panel=_SIGNALS,
        ),
    ] = None,
    record_dtype: Annotated[
        str,
        typer.Option(
            help="Data type of the models in studies of distributions.", rich_help_panel=_WORKLOAD
        ),
    ] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    batch_sizes: Annotated[
        str, typer.Option(help="Separated by commas.", rich_help_panel=_TIMED)
    ] = "1,8,32",
    contexts: Annotated[
        str,
        typer.Option(
            help="Context lengths in tokens, separated by commas.", rich_help_panel=_TIMED
        ),
    ] = "128,256,512,1024,2048,4096,8192",
    cost_ratios: Annotated[
        str,
        typer.Option(
            help="Parameters of the target relative to the draft's, of the study cost-ratio.",
            rich_help_panel=_TIMED,
        ),
    ] = "100,40,20,10",
    rounds: Annotated[
        int, typer.Option(help="Number of interleaved measurements.", rich_help_panel=_TIMED)
    ] = 4,
    turn: Annotated[
        float, typer.Option(help="Seconds per measurement.", rich_help_panel=_TIMED)
    ] = 0.2,
    warm_up_steps: Annotated[
        int,
        typer.Option(help="Untimed steps of policies that adapt.", rich_help_panel=_TIMED),
    ] = 60,
    redraw: Annotated[
        bool,
        typer.Option("--redraw", help="Write figures and texts again from existing data."),
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="Number of CPU threads.", rich_help_panel=RUNNING)
    ] = None,
    engine: Values,
) -> None:
    """Reproduce tables and figures of the papers for your models.

    Writes data.json, figure.svg, figure.png and text.md to DIR/NAME. `all` also writes
    DIR/report.html. Run timed studies on an otherwise idle machine.

    Examples:
      draftwise study list
      draftwise study bounds rejection --prompts gsm8k.jsonl
      draftwise study all --target TARGET --draft DRAFT --companion COMPANION --prompts FILE -o DIR
    """
    console = Console(highlight=False)
    from draftwise.studies.catalogue import STUDIES, study_class

    if names == ["list"]:
        _show(console, STUDIES.values())
        return
    _require_drawing()
    is_all = names == [_ALL]
    names = list(STUDIES) if is_all else [study_class(name).name for name in names]
    make_folder(output)
    if redraw:
        from draftwise.studies.writing import DATA
        from draftwise.studies.writing import redraw as redraw_studies

        if is_all:
            names = [each for each in names if (output / each / DATA).is_file()]
        redraw_studies(output, names)
    else:
        from draftwise.studies.sampling import Sampling
        from draftwise.studies.settings import StudySettings

        small = tuple(each.strip() for each in (models or "").split(",") if each.strip())
        chosen = choose_models(_ZOO, target, draft, companion, small)
        settings = StudySettings(
            prompts=tuple(prompts or ()),
            target=chosen.target,
            draft=chosen.require_draft_model("studies are about drafts"),
            companion=chosen.companion,
            models=chosen.models,
            head=head,
            num_prompts=num_prompts,
            longest_prompt=longest_prompt,
            max_tokens=max_tokens,
            long_text=long_text,
            num_speculative_tokens=num_speculative_tokens,
            temperature=temperature,
            **sampling,
            batch_sizes=tuple(parse_numbers("batch_sizes", batch_sizes)),
            contexts=tuple(parse_numbers("contexts", contexts)),
            cost_ratios=tuple(parse_numbers("cost_ratios", cost_ratios)),
            turn=turn,
            rounds=rounds,
            warm_up_steps=warm_up_steps,
            samplings=tuple(map(Sampling.parse, samplings.split(","))),
            recordings=recordings,
            pass_times=pass_times,
            record_dtype=record_dtype,
            chat=not plain,
            seed=seed,
            **engine,
        )
        names = _possible(console, names, settings, skip=is_all)
        if threads is not None:
            set_threads(threads)
        _run(console, names, settings, output, skip=is_all)
    if is_all:
        from draftwise.studies.writing import write_page

        console.print(f"written to {write_page(output)}", soft_wrap=True)


def _possible(console: Console, names: list[str], settings: StudySettings, skip: bool) -> list[str]:
    """Select the studies whose models are all named.

    Raises:
        InvalidParameterError: models of a study are not named, and it is not to be skipped.
    """
    from draftwise.studies.catalogue import study_class

    possible = []
    for name in names:
        try:
            study_class(name).check_models(settings)
        except InvalidParameterError as error:
            if not skip:
                raise
            _print_skipped(console, name, error)
        else:
            possible.append(name)
    return possible


def _run(
    console: Console, names: list[str], settings: StudySettings, output: Path, skip: bool
) -> None:
    """Measure studies one after another with a shared workbench.

    Raises:
        InvalidParameterError: a study cannot be measured with these models and prompts, and it is
            not to be skipped.
    """
    from draftwise.studies.catalogue import study_class
    from draftwise.studies.workbench import Workbench
    from draftwise.studies.writing import about, write_study

    with console.status("") as status:
        bench = Workbench(settings, status.update)
        try:
            for name in names:
                each = study_class(name)()
                status.update(each.title)
                start = time.perf_counter()
                try:
                    measured = each.measure(bench)
                except InvalidParameterError as error:
                    if not skip:
                        raise
                    _print_skipped(console, name, error)
                    continue
                seconds = time.perf_counter() - start
                provenance = about(settings, seconds, _command())
                description = write_study(output / name, each, measured, provenance)
                _print_description(console, each, description)
        finally:
            bench.close()


def _print_skipped(console: Console, name: str, error: InvalidParameterError) -> None:
    flag = "--" + error.field.replace("_", "-")
    console.print(f"[bold]{name}[/] is skipped: {flag}: ", end="")
    console.print(error.message, markup=False, soft_wrap=True)


def _command() -> str:
    """The command line, with paths reduced to file names."""
    words = ["draftwise", *sys.argv[1:]]
    return shlex.join(
        Path(word).name if os.sep in word and Path(word).exists() else word for word in words
    )


def _print_description(console: Console, study: Study, description: Description) -> None:
    console.print(f"[bold]{study.title}[/] [dim]{study.name}[/]")
    console.print(description.text, markup=False)
    for finding in description.findings:
        console.print(f"[bold]{finding.verdict}[/]: ", end="")
        console.print(f"{finding.source} {finding.ours}", markup=False)
    console.print()


def _show(console: Console, studies: Iterable[type[Study]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("study", "title", "source", ""):
        table.add_column(heading)
    for each in studies:
        table.add_row(each.name, each.title, each.source, "timed" if each.timed else "")
    console.print(table)


def _require_drawing() -> None:
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidParameterError(
            "study", f"needs packages for figures; install draftwise[studies] ({error})"
        ) from None
