"""``draftwise benchmark``: policies and other engines side by side, as files and a page."""

from __future__ import annotations

import json
import os
import resource
import sys
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

from draftwise.cli.benchmark_tables import show_cell, show_changes
from draftwise.cli.options import parse_numbers, set_threads
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
    from draftwise.models.loading import LoadedModel

_MODELS, _WORK, _PEERS = "Models", "Work", "Other engines"
_GIB = 2**30


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
    _check_output(output)
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
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed
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
        report = _report(started, settings, llm, contenders) | {"cells": cells}
    finally:
        for contender in contenders:
            contender.close()
    _write(output, report)
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
    models = _models(llm, contenders)
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


def _models(llm: LLM, contenders: list[Contender]) -> dict[str, LoadedModel]:
    """All models of ours that take part, by role."""
    from draftwise.benchmark.contenders import PolicyContender

    models = {"target": llm.target}
    for contender in contenders:
        if isinstance(contender, PolicyContender):
            for role in ("draft", "companion"):
                model = getattr(contender.llm, role)
                if model is not None:
                    models[role] = model
    return models


def _report(
    started: str, settings: dict[str, Any], llm: LLM, contenders: list[Contender]
) -> dict[str, Any]:
    from draftwise.benchmark.report import provenance

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if _is_mac() else 1024)
    return {
        "started": started,
        "command": " ".join(["draftwise", *sys.argv[1:]]),
        **provenance(settings),
        "settings": {name: _portable(value) for name, value in settings.items()},
        "models": {
            role: {
                "name": model.name,
                "fingerprint": model.fingerprint,
                "parameters": model.num_parameters,
            }
            for role, model in _models(llm, contenders).items()
        },
        "contenders": {each.name: each.describe() for each in contenders},
        "peak_memory_gib": peak / _GIB,
    }


def _portable(value: Any) -> Any:
    """Of files only their names: where they lie is no property of a result."""
    if isinstance(value, list):
        return [_portable(each) for each in value]
    return value.name if isinstance(value, Path) else value


def _is_mac() -> bool:
    return sys.platform == "darwin"


def _write(output: Path, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=2, default=str)
    (output / "results.json").write_text(text + "\n", encoding="utf-8")
    try:
        from draftwise.benchmark.page import write_page
    except ImportError as error:
        raise InvalidParameterError(
            "output",
            f"results.json is written; for report.html install draftwise[bench] ({error})",
        ) from None
    write_page(output / "report.html", json.loads(text))


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


def _check_output(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidParameterError("output", f"cannot make {str(output)!r}: {error}") from error
    if not os.access(output, os.W_OK):
        raise InvalidParameterError("output", f"cannot write into {str(output)!r}")
