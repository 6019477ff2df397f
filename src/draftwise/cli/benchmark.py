"""``draftwise benchmark``: policies and other engines side by side, as files and a page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from draftwise.cli.benchmark_files import models_of, report_of, write_files
from draftwise.cli.benchmark_tables import show_cell, show_changes
from draftwise.cli.options import check_max_tokens, make_folder, parse_numbers, set_threads
from draftwise.cli.shared import (
    RUNNING,
    TARGET_HELP,
    Device,
    DraftReplicas,
    Dtype,
    Overlap,
    TopK,
    TopP,
    TrustRemoteCode,
)
from draftwise.errors import DraftwiseError, InvalidParameterError

if TYPE_CHECKING:
    from draftwise.benchmark.contenders import Contender
    from draftwise.benchmark.workload import Workload
    from draftwise.llm import LLM

_MODELS, _WORK, _PEERS = "Models", "Work", "Other engines"


def benchmark(
    workload: Annotated[
        list[Path],
        typer.Option(
            help="JSON lines with prompt, question, turns or text; may be repeated.",
            metavar="FILE",
            rich_help_panel=_WORK,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the report.", metavar="DIR")
    ] = Path("benchmark"),
    policies: Annotated[
        str,
        typer.Option(
            help="Names separated by commas, each with a longest draft of its own if you like: "
            "fixed:3,fixed:5,sv. The target alone is always measured.",
            rich_help_panel=_WORK,
        ),
    ] = "fixed,adaptive",
    batch_sizes: Annotated[
        str, typer.Option(help="Separated by commas.", rich_help_panel=_WORK)
    ] = "1,8,32",
    num_prompts: Annotated[
        int, typer.Option(help="Of each file, the first.", min=1, rich_help_panel=_WORK)
    ] = 64,
    rounds: Annotated[
        int,
        typer.Option(
            help="Turns of each contender per workload and batch size.",
            min=1,
            rich_help_panel=_WORK,
        ),
    ] = 7,
    learning_turns: Annotated[
        int,
        typer.Option(
            help="Untimed turns before, of policies that find out while they run what pays.",
            min=0,
            rich_help_panel=_WORK,
        ),
    ] = 4,
    max_tokens: Annotated[
        int, typer.Option(help="Generated per prompt, always all.", rich_help_panel=_WORK)
    ] = 64,
    longest_prompt: Annotated[
        int,
        typer.Option(help="In tokens; longer ones are left out.", min=1, rich_help_panel=_WORK),
    ] = 256,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Send prompts through the chat template.", rich_help_panel=_WORK
        ),
    ] = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_WORK)] = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Annotated[int | None, typer.Option(help="Of the first answer.")] = 0,
    target: Annotated[
        str, typer.Option(help=TARGET_HELP, rich_help_panel=_MODELS)
    ] = "zoo:target@200m",
    draft: Annotated[
        str, typer.Option(help="The model that writes ahead.", rich_help_panel=_MODELS)
    ] = "zoo:draft",
    companion: Annotated[
        str | None,
        typer.Option(
            help="A model that judges the draft; draft:int8 is the draft quantised.",
            rich_help_panel=_MODELS,
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Most tokens drafted per step.", rich_help_panel=_WORK)
    ] = 5,
    profile: Annotated[
        Path | None,
        typer.Option(help="What `draftwise profile` learnt.", metavar="FILE"),
    ] = None,
    latency_profile: Annotated[
        Path | None,
        typer.Option(help="What `draftwise profile-latency` measured.", metavar="FILE"),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="transformers, vllm, openvino, separated by commas, each with the interpreter of "
            "its environment where that is not this one: vllm=/opt/vllm/bin/python.",
            rich_help_panel=_PEERS,
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="An older results.json; says what got slower.", metavar="FILE"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="To compute with.", rich_help_panel=RUNNING)
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    overlap: Overlap = None,
    draft_replicas: DraftReplicas = 1,
) -> None:
    """Measure policies and other engines side by side on the same prompts.

    All take turns, in an order that changes, so that whatever else the machine does meets all
    alike. Writes results.json, report.html and answers in the format of Spec-Bench. Run it on a
    machine that does nothing else.

    Examples:
      draftwise benchmark --workload gsm8k.jsonl --chat --policies fixed:3,fixed:5,adaptive
      draftwise benchmark --workload gsm8k.jsonl --peers transformers --compare old/results.json
    """
    started = time.strftime("%Y-%m-%d")
    console = Console(highlight=False)
    settings = dict(locals())
    del settings["console"], settings["started"]
    sizes = _sizes(batch_sizes)
    make_folder(output)
    if threads is not None:
        set_threads(threads)

    import torch

    from draftwise.benchmark.comparison import changes, load_report
    from draftwise.benchmark.contenders import policy_contenders
    from draftwise.benchmark.peers import PeerModels
    from draftwise.benchmark.peers import peers as make_peers
    from draftwise.benchmark.workload import load_workload
    from draftwise.llm import LLM
    from draftwise.params import SamplingParams, SpeculationConfig

    old = None if compare is None else load_report(compare)
    settings["threads"] = torch.get_num_threads()
    params = SamplingParams(
        max_tokens=check_max_tokens(max_tokens),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
    )
    speculation = SpeculationConfig(
        draft=draft,
        companion=companion,
        policy="none",
        num_speculative_tokens=num_speculative_tokens,
        profile=None if profile is None else str(profile),
        latency_profile=None if latency_profile is None else str(latency_profile),
    )
    longest = longest_prompt + max_tokens + 2 * num_speculative_tokens
    with console.status("loading") as status:
        try:
            llm = LLM(
                target,
                None,
                dtype,
                device,
                max_batch_size=max(sizes),
                max_model_len=longest,
                trust_remote_code=trust_remote_code,
                overlap=overlap,
                draft_replicas=draft_replicas,
                on_status=status.update,
            )
        except DraftwiseError as error:
            if error.field != "max_model_len":
                raise
            raise InvalidParameterError(
                "longest_prompt", f"with its answer {error.message}"
            ) from None
        settings["dtype"] = str(llm.target.model.dtype).removeprefix("torch.")
        workloads = [
            load_workload(llm, path, num_prompts, longest_prompt, chat) for path in workload
        ]
        ours = policy_contenders(llm, _names(policies), speculation)
        others: Sequence[Contender] = ()
        if peers:
            loaded = PeerModels(
                _folder(target),
                _folder(draft),
                settings["dtype"],
                settings["threads"],
                longest,
                max(sizes),
                _plain_folder(companion),
            )
            others = make_peers(_names(peers), loaded, output / "logs")
    contenders: list[Contender] = [*ours, *others]
    try:
        cells = _run(
            console, contenders, workloads, sizes, rounds, learning_turns, params, llm, output
        )
        report = report_of(started, settings, llm, contenders) | {"cells": cells}
    finally:
        for contender in contenders:
            contender.close()
    write_files(output, report)
    console.print(f"written to {output}/results.json and report.html", soft_wrap=True)
    if old is not None:
        show_changes(console, changes(old, report))


def _run(
    console: Console,
    contenders: list[Contender],
    workloads: list[Workload],
    sizes: list[int],
    rounds: int,
    learning_turns: int,
    params: Any,
    llm: LLM,
    output: Path,
) -> list[dict[str, Any]]:
    """All cells, shown as they come."""
    from draftwise.benchmark.answers import write_answers
    from draftwise.benchmark.contest import compete, make_cell
    from draftwise.benchmark.figures import Parameters, figures_of_cell

    cells = []
    models = models_of(llm, contenders)
    sizes_of_models = Parameters(**{role: m.num_parameters for role, m in models.items()})
    tokenizer = llm.target.tokenizer

    def decode(tokens: list[int]) -> str:
        return "" if tokenizer is None else str(tokenizer.decode(tokens))

    for each in workloads:
        for size in sizes:
            cell = make_cell(each.name, each.prompts, size, rounds)
            playing = [c for c in contenders if c.can_run(size, params.temperature)]
            turns = len(playing) * (rounds + 1) + learning_turns * sum(c.learns for c in playing)
            with Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("turns"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
                disable=not console.is_terminal,
            ) as bar:
                task = bar.add_task(each.name, total=turns)

                title = f"{each.name}, batch {size}"
                on_turn = partial(_advance, bar, task, title)
                results = compete(cell, contenders, params, learning_turns, on_turn)
            greedy = params.temperature == 0
            figures = figures_of_cell(cell, results, sizes_of_models, greedy)
            show_cell(console, figures)
            write_answers(output, cell, results, each.categories, decode)
            cells.append(figures)
    return cells


def _advance(bar: Progress, task: TaskID, title: str, name: str) -> None:
    bar.update(task, advance=1, description=f"{title}: {name}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _sizes(text: str) -> list[int]:
    sizes = parse_numbers("batch_sizes", text)
    if min(sizes) < 1:
        raise InvalidParameterError("batch_sizes", f"must be positive, got {text!r}")
    return sizes


def _plain_folder(name: str | None) -> str | None:
    """The same of a companion, which others do without where it is to be quantised."""
    from draftwise.models.loading import split_name

    return None if name is None or split_name(name)[1] is not None else _folder(name)


def _folder(name: str) -> str:
    """What other engines can load: the folder of a bundled model, any other name as it is.

    Raises:
        InvalidParameterError: it is to be quantised, which others would do in ways of their own.
    """
    from draftwise import zoo
    from draftwise.models.loading import split_name

    if split_name(name)[1] is not None:
        raise InvalidParameterError("peers", f"load models as they are, not {name!r}")
    return str(zoo.resolve(name)) if name.startswith("zoo:") else name
