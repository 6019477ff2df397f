"""``draftwise benchmark``: compare policies and other engines, and write a report."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from draftwise.benchmark.servers.settings import LoadSettings
from draftwise.cli.benchmark_files import report_of, write_files, write_results
from draftwise.cli.benchmark_head import train_head, with_head
from draftwise.cli.benchmark_servers import (
    SERVER_LOAD_OPTIONS,
    benchmark_servers,
    check_options,
)
from draftwise.cli.benchmark_tables import show_changes
from draftwise.cli.defaults import Zoo, choose_models, refuse_without_draft
from draftwise.cli.fields import Values, takes
from draftwise.cli.option_values import (
    check_max_tokens,
    make_folder,
    parse_numbers,
    parse_temperatures,
    read_chat_template,
    set_chat_template,
    set_threads,
)
from draftwise.cli.options import (
    ENGINE_OPTIONS,
    MODELS,
    RUNNING,
    SAMPLING_OPTIONS,
    SPECULATION_OPTIONS,
    TARGET_HELP,
    ChatTemplate,
    Companion,
    Draft,
)
from draftwise.cli.presets import use_preset
from draftwise.errors import InvalidParameterError
from draftwise.params import SamplingParams
from draftwise.speculation import SpeculationConfig

if TYPE_CHECKING:
    from draftwise.benchmark.contenders import Contender

_WORKLOAD, _TRAINING, _PEERS = "Workload", "A head of the target", "Other engines"


@takes(
    sampling=SAMPLING_OPTIONS.only("top_p", "top_k"),
    drafting=SPECULATION_OPTIONS.only("num_speculative_tokens", "tree_width", "guard"),
    load=SERVER_LOAD_OPTIONS,
    engine=ENGINE_OPTIONS.only(
        *("dtype", "device", "max_model_len", "trust_remote_code", "overlap", "draft_replicas")
    ),
)
def benchmark(
    context: typer.Context,
    *,
    workload: Annotated[
        list[Path],
        typer.Option(
            help="JSON lines with prompt, question, turns or text; may be repeated.",
            metavar="FILE",
            rich_help_panel=_WORKLOAD,
        ),
    ],
    preset: Annotated[
        str | None,
        typer.Option(
            help="Set of defaults for options that are not given: gemma.",
            metavar="NAME",
            callback=use_preset,
            is_eager=True,
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the report.", metavar="DIR")
    ] = Path("benchmark"),
    policies: Annotated[
        str | None,
        typer.Option(
            help="Names separated by commas, each optionally with a maximum draft length, a tree "
            "width and one of the drafts: fixed:3,fixed:5@suffix,eagle2:16x4. Target-only "
            "decoding is always measured.",
            show_default="fixed,adaptive, and sv with a companion",
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    batch_sizes: Annotated[
        str, typer.Option(help="Separated by commas.", rich_help_panel=_WORKLOAD)
    ] = "1,8,32",
    num_prompts: Annotated[
        int,
        typer.Option(
            help="Maximum number of prompts read from each file.", min=1, rich_help_panel=_WORKLOAD
        ),
    ] = 64,
    rounds: Annotated[
        int,
        typer.Option(
            help="Number of runs of each contender per workload and batch size.",
            min=1,
            rich_help_panel=_WORKLOAD,
        ),
    ] = 7,
    learning_turns: Annotated[
        int,
        typer.Option(
            help="Number of untimed runs before, for policies that adapt while they run.",
            min=0,
            rich_help_panel=_WORKLOAD,
        ),
    ] = 4,
    max_tokens: Annotated[
        int,
        typer.Option(
            help="Number of tokens generated per prompt, beyond end-of-sequence tokens.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = 64,
    stop_at_eos: Annotated[
        bool,
        typer.Option(
            "--stop-at-eos",
            help="End answers at end-of-sequence tokens, before --max-tokens.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = False,
    longest_prompt: Annotated[
        int | None,
        typer.Option(
            help="Maximum number of prompt tokens; longer prompts are skipped.",
            show_default="256, or less if the context is shorter",
            min=1,
            rich_help_panel=_WORKLOAD,
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Format prompts with the target's chat template.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = False,
    chat_template: ChatTemplate = None,
    multi_turn: Annotated[
        bool,
        typer.Option(
            "--multi-turn",
            help="Measure the last turns of conversations (turns, as in MT-Bench). The target "
            "answers the earlier turns before, greedily, with up to --max-tokens tokens each.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = False,
    temperature: Annotated[
        str,
        typer.Option(help="Separated by commas; 0 for greedy decoding.", rich_help_panel=_WORKLOAD),
    ] = "0",
    sampling: Values,
    seed: Annotated[int | None, typer.Option(help="Seed of the first prompt.")] = 0,
    target: Annotated[
        str | None,
        typer.Option(help=TARGET_HELP, show_default="zoo:target@200m", rich_help_panel=MODELS),
    ] = None,
    draft: Draft = None,
    companion: Companion = None,
    drafting: Values,
    train_on: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prompts for `draftwise train eagle3`: a head of the target is trained on them "
            "first, and drafts beside the other drafts. May be repeated.",
            metavar="FILE",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    train_minutes: Annotated[
        float, typer.Option(help="Time for this training.", rich_help_panel=_TRAINING)
    ] = 60.0,
    profile: Annotated[
        Path | None,
        typer.Option(help="Acceptance profile written by `draftwise profile`.", metavar="FILE"),
    ] = None,
    latency_profile: Annotated[
        Path | None,
        typer.Option(
            help="Latency profile written by `draftwise profile-latency`.", metavar="FILE"
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="transformers, vllm, openvino or llamacpp, separated by commas, each optionally "
            "with the Python interpreter of its environment: vllm=/opt/vllm/bin/python. They use "
            "the draft model; with --draft suffix or ngram they draft from the text too.",
            rich_help_panel=_PEERS,
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="results.json of an earlier run to compare with.", metavar="FILE"),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Number of CPU threads.", rich_help_panel=RUNNING)
    ] = None,
    load: LoadSettings,
    engine: Values,
) -> None:
    """Compare the speed of policies and other engines on the same prompts.

    The runs of all contenders are interleaved in varying order, so that other load on the machine
    affects all of them equally. Writes results.json, report.html and the answers in the format of
    Spec-Bench. Run it on an otherwise idle machine. With --server, OpenAI-compatible servers are
    measured under load instead.

    Examples:
      draftwise benchmark --workload gsm8k.jsonl --chat --policies fixed:3,fixed:5,adaptive
      draftwise benchmark --workload gsm8k.jsonl --peers transformers --compare old/results.json
      draftwise benchmark --preset gemma --workload gsm8k_test.jsonl --train-on gsm8k_train.jsonl
      draftwise benchmark --workload spec_bench.jsonl --server http://127.0.0.1:8000
    """
    settings = {**locals(), **sampling, **drafting, **engine}
    for name in ("context", "sampling", "drafting", "engine", "load"):
        del settings[name]
    check_options(context)
    started = time.strftime("%Y-%m-%d")
    console = Console(highlight=False)
    sizes = _sizes(batch_sizes)
    temperatures = parse_temperatures("temperature", temperature)
    for path in workload:
        if not path.exists():
            raise InvalidParameterError("workload", f"there is no file {str(path)!r}")
    _check_distinct(workload)
    make_folder(output)
    if load.servers:
        benchmark_servers(
            load,
            settings,
            temperatures,
            None if policies is None else _names(policies),
        )
        return
    models = choose_models(Zoo("zoo:target@200m"), target, draft, companion)
    if train_on:
        if chat_template is not None:
            raise InvalidParameterError("chat_template", "cannot be used together with --train-on")
        models = with_head(models, draft, output)
    if models.draft is None:
        refuse_without_draft(context)
        policies = ""
    elif policies is None:
        policies = "fixed,adaptive" if models.companion is None else "fixed,adaptive,sv"
    if models.draft_is_missing:
        typer.echo(
            "no draft: only target-only decoding is measured; name a draft with --draft DRAFT",
            err=True,
        )
    if threads is not None:
        set_threads(threads)

    import torch

    from draftwise.benchmark.comparison import changes, differences, load_report
    from draftwise.benchmark.contenders import policy_contenders
    from draftwise.benchmark.conversations import load_multi_turn_workload
    from draftwise.benchmark.peers import peers as make_peers
    from draftwise.benchmark.workload import load_workload
    from draftwise.cli.benchmark_run import run_cells
    from draftwise.cli.benchmark_setup import (
        check_names,
        context_lengths,
        load_target,
        lookup_lengths,
        peer_models,
    )

    old = None if compare is None else load_report(compare)
    if chat_template is not None and not (chat or multi_turn):
        raise InvalidParameterError("chat_template", "requires --chat or --multi-turn")
    template = read_chat_template(chat_template)
    params = [
        SamplingParams(
            max_tokens=check_max_tokens(max_tokens),
            temperature=each,
            **sampling,
            seed=seed,
            ignore_eos=not stop_at_eos,
        )
        for each in temperatures
    ]
    speculation = None
    if models.draft is not None:
        speculation = SpeculationConfig(
            draft=models.draft,
            companion=models.companion,
            policy="none",
            **drafting,
            profile=None if profile is None else str(profile),
            latency_profile=None if latency_profile is None else str(latency_profile),
        )
    draft_length, max_model_len = drafting["num_speculative_tokens"], engine.pop("max_model_len")
    lengths = context_lengths(longest_prompt, max_tokens + 2 * draft_length, max_model_len)
    check_names(_names(policies), _names(peers or ""))
    if train_on:
        training: dict[str, Any] = {
            "chat": chat or multi_turn,
            "temperatures": temperature,
            "threads": threads,
            **{name: engine[name] for name in ("dtype", "device", "trust_remote_code")},
        }
        train_head(models.target, train_on, train_minutes, output, training)
    with console.status("loading") as status:
        llm, longest = load_target(
            models.target,
            lengths,
            {**engine, "max_batch_size": max(sizes), "on_status": status.update},
        )
        settings |= {
            "target": models.target,
            "draft": models.draft,
            "policies": policies,
            "longest_prompt": longest,
            "max_model_len": llm.target.max_model_len,
            "threads": torch.get_num_threads(),
            "dtype": str(llm.target.model.dtype).removeprefix("torch."),
        }
        if stop_at_eos and not llm.target.eos_token_ids:
            raise InvalidParameterError("stop_at_eos", "the target has no end-of-sequence token")
        set_chat_template(llm, template)
        if multi_turn:
            status.update("answering the earlier turns")
            read = partial(load_multi_turn_workload, max_tokens=max_tokens)
        else:
            read = partial(load_workload, chat=chat)
        workloads = [read(llm, path, num_prompts, longest) for path in workload]
        contenders: list[Contender] = [*policy_contenders(llm, _names(policies), speculation)]
        if peers:
            loaded = peer_models(models, llm, engine["dtype"], settings["threads"], max(sizes))
            looked_up = lookup_lengths(models.draft, _names(policies), draft_length)
            contenders += make_peers(_names(peers), loaded, output / "logs", looked_up)

    def report_on(cells: list[dict[str, Any]], is_complete: bool) -> dict[str, Any]:
        about = report_of(started, settings, llm, contenders)
        return about | {"is_complete": is_complete, "cells": cells}

    try:
        cells: list[dict[str, Any]] = []
        for cell in run_cells(
            console, contenders, workloads, params, sizes, rounds, learning_turns, llm, output
        ):
            cells.append(cell)
            # An interrupted run keeps what it has measured.
            write_results(output, report_on(cells, is_complete=False))
        report = report_on(cells, is_complete=True)
    finally:
        for contender in contenders:
            contender.close()
    write_files(output, report)
    console.print(f"written to {output}/results.json and report.html", soft_wrap=True)
    if old is not None:
        show_changes(console, changes(old, report), differences(old, report))


def _check_distinct(workloads: list[Path]) -> None:
    """Refuse workloads of the same name: their results would be mixed up."""
    names = [path.stem for path in workloads]
    for name in names:
        if names.count(name) > 1:
            raise InvalidParameterError("workload", f"two files are named {name!r}; rename one")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _sizes(text: str) -> list[int]:
    sizes = parse_numbers("batch_sizes", text)
    if min(sizes) < 1:
        raise InvalidParameterError("batch_sizes", f"must be positive, got {text!r}")
    return sizes
