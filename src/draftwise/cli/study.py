"""``draftwise study``: the papers' tables and figures for any models."""

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
from draftwise.cli.options import make_folder, parse_numbers, set_threads
from draftwise.cli.shared import (
    MODELS,
    RUNNING,
    TARGET_HELP,
    Device,
    Draft,
    Dtype,
    MaxModelLen,
    TopP,
    TrustRemoteCode,
)
from draftwise.errors import InvalidParameterError

if TYPE_CHECKING:
    from draftwise.studies.settings import StudySettings
    from draftwise.studies.study import Account, Study

_WORK, _TIMES = "Work", "Studies that take times"
_EVERY = "all"
_ZOO = Zoo(
    "zoo:target@200m",
    "zoo:draft",
    "zoo:companion",
    ("zoo:draft", "zoo:mid", "zoo:companion", "zoo:spare"),
)


def study(
    names: Annotated[
        list[str],
        typer.Argument(help="Of studies, or all; list shows them.", metavar="NAME..."),
    ],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines with prompt, question, turns or text; may be repeated.",
            metavar="FILE",
            rich_help_panel=_WORK,
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the results.", metavar="DIR")
    ] = Path("studies"),
    target: Annotated[
        str | None,
        typer.Option(
            help=f"{TARGET_HELP} What is not timed runs on the origin of an inflated one.",
            show_default=_ZOO.target,
            rich_help_panel=MODELS,
        ),
    ] = None,
    draft: Draft = None,
    companion: Annotated[
        str | None,
        typer.Option(
            help="A model that judges the draft.",
            show_default="zoo:companion with a target of the zoo",
            rich_help_panel=MODELS,
        ),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help="Separated by commas: small models that studies let take each other's places.",
            show_default="those of the zoo with a target of the zoo, otherwise draft and companion",
            rich_help_panel=MODELS,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Of each task.", rich_help_panel=_WORK)] = 8,
    longest_prompt: Annotated[
        int, typer.Option(help="In tokens; longer ones are left out.", rich_help_panel=_WORK)
    ] = 300,
    max_tokens: Annotated[int, typer.Option(help="Per prompt.", rich_help_panel=_WORK)] = 64,
    long_text: Annotated[
        int, typer.Option(help="Tokens of a long generation.", rich_help_panel=_WORK)
    ] = 384,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Most tokens drafted per step.", rich_help_panel=_WORK)
    ] = 5,
    temperature: Annotated[
        float, typer.Option(help="Of all models, above 0.", rich_help_panel=_WORK)
    ] = 1.0,
    top_p: TopP = 1.0,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Prompts as they are, no chat.", rich_help_panel=_WORK),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    batch_sizes: Annotated[
        str, typer.Option(help="Separated by commas.", rich_help_panel=_TIMES)
    ] = "1,8,32",
    contexts: Annotated[
        str, typer.Option(help="In tokens, separated by commas.", rich_help_panel=_TIMES)
    ] = "128,256,512,1024,2048,4096,8192",
    rounds: Annotated[int, typer.Option(help="Turns of each.", rich_help_panel=_TIMES)] = 4,
    turn: Annotated[float, typer.Option(help="Seconds of a turn.", rich_help_panel=_TIMES)] = 0.2,
    warm_up_steps: Annotated[
        int, typer.Option(help="Of policies that learn.", rich_help_panel=_TIMES)
    ] = 60,
    redraw: Annotated[
        bool,
        typer.Option("--redraw", help="Pictures and words anew from the data in the folder."),
    ] = False,
    threads: Annotated[
        int | None, typer.Option(help="To compute with.", rich_help_panel=RUNNING)
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Recompute tables and figures of the papers for your models.

    Writes data.json, figure.svg, figure.png and text.md into DIR/NAME, and with all of them
    DIR/report.html. Studies that take times want a machine that does nothing else.

    Examples:
      draftwise study list
      draftwise study bounds rejection --prompts gsm8k.jsonl
      draftwise study all --target TARGET --draft DRAFT --companion COMPANION --prompts FILE -o DIR
    """
    console = Console(highlight=False)
    _require_drawing()
    from draftwise.studies.registry import STUDIES, study_class

    if names == ["list"]:
        _show(console, STUDIES.values())
        return
    every = names == [_EVERY]
    names = list(STUDIES) if every else [study_class(name).name for name in names]
    make_folder(output)
    if redraw:
        from draftwise.studies.writing import DATA
        from draftwise.studies.writing import redraw as draw_again

        if every:
            names = [each for each in names if (output / each / DATA).is_file()]
        draw_again(output, names)
    else:
        from draftwise.studies.settings import StudySettings

        small = tuple(each.strip() for each in (models or "").split(",") if each.strip())
        chosen = choose_models(_ZOO, target, draft, companion, small)
        settings = StudySettings(
            prompts=tuple(prompts or ()),
            target=chosen.target,
            draft=chosen.require_draft("studies are about drafts"),
            companion=chosen.companion,
            models=chosen.models,
            num_prompts=num_prompts,
            longest_prompt=longest_prompt,
            max_tokens=max_tokens,
            long_text=long_text,
            num_speculative_tokens=num_speculative_tokens,
            temperature=temperature,
            top_p=top_p,
            batch_sizes=tuple(parse_numbers("batch_sizes", batch_sizes)),
            contexts=tuple(parse_numbers("contexts", contexts)),
            turn=turn,
            rounds=rounds,
            warm_up_steps=warm_up_steps,
            chat=not plain,
            seed=seed,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            trust_remote_code=trust_remote_code,
        )
        names = _possible(console, names, settings, every)
        if threads is not None:
            set_threads(threads)
        _run(console, names, settings, output, leave_out=every)
    if every:
        from draftwise.studies.writing import write_page

        console.print(f"written to {write_page(output)}", soft_wrap=True)


def _possible(
    console: Console, names: list[str], settings: StudySettings, leave_out: bool
) -> list[str]:
    """The studies for which all models are named; others are left out or refused."""
    from draftwise.studies.registry import study_class

    possible = []
    for name in names:
        try:
            study_class(name).check_models(settings)
        except InvalidParameterError as error:
            if not leave_out:
                raise
            _tell_left_out(console, name, error)
        else:
            possible.append(name)
    return possible


def _run(
    console: Console, names: list[str], settings: StudySettings, output: Path, leave_out: bool
) -> None:
    """Measure one study after the other, sharing what they share.

    What cannot be measured with these models and prompts is left out with its reason, or refused.
    """
    from draftwise.studies.registry import study_class
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
                    if not leave_out:
                        raise
                    _tell_left_out(console, name, error)
                    continue
                seconds = time.perf_counter() - start
                told = about(settings, seconds, _command())
                _tell(console, each, write_study(output / name, each, measured, told))
        finally:
            bench.close()


def _tell_left_out(console: Console, name: str, error: InvalidParameterError) -> None:
    flag = "--" + error.field.replace("_", "-")
    console.print(f"[bold]{name}[/] is left out: {flag}: ", end="")
    console.print(error.message, markup=False, soft_wrap=True)


def _command() -> str:
    """The command line; of files only their names."""
    words = ["draftwise", *sys.argv[1:]]
    return shlex.join(
        Path(word).name if os.sep in word and Path(word).exists() else word for word in words
    )


def _tell(console: Console, study: Study, account: Account) -> None:
    console.print(f"[bold]{study.title}[/] [dim]{study.name}[/]")
    console.print(account.text, markup=False)
    for finding in account.findings:
        console.print(f"[bold]{finding.verdict}[/]: ", end="")
        console.print(f"{finding.source} {finding.ours}", markup=False)
    console.print()


def _show(console: Console, studies: Iterable[type[Study]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("study", "what", "source", ""):
        table.add_column(heading)
    for each in studies:
        table.add_row(each.name, each.title, each.source, "takes times" if each.timed else "")
    console.print(table)


def _require_drawing() -> None:
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidParameterError(
            "study", f"needs pictures; install draftwise[studies] ({error})"
        ) from None
