"""Measurements of ``draftwise benchmark``, with a progress bar."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from draftwise.benchmark.answers import write_answers
from draftwise.benchmark.contenders import Contender, PolicyContender
from draftwise.benchmark.contest import WARM_UP_TURNS, compete, make_cell
from draftwise.benchmark.figures import Parameters, figures_of_cell
from draftwise.benchmark.workload import Workload
from draftwise.cli.benchmark_tables import show_cell
from draftwise.llm import LLM
from draftwise.params import SamplingParams


def run_cells(
    console: Console,
    contenders: Sequence[Contender],
    workloads: Sequence[Workload],
    sampling: Sequence[SamplingParams],
    sizes: Sequence[int],
    rounds: int,
    learning_turns: int,
    llm: LLM,
    output: Path,
) -> Iterator[dict[str, Any]]:
    """Measure all workloads at all temperatures and batch sizes, and print the results of each.

    Args:
        console: console to print to.
        contenders: policies and other engines.
        workloads: workloads with their prompts.
        sampling: sampling parameters of all prompts, for one temperature each.
        sizes: batch sizes.
        rounds: number of timed runs per contender.
        learning_turns: number of untimed runs before, for contenders that adapt.
        llm: the loaded target.
        output: folder for the answers.

    Yields:
        The results of each workload, temperature and batch size.
    """
    parameters = {c.name: _parameters(c.llm) for c in contenders if isinstance(c, PolicyContender)}
    tokenizer = llm.target.tokenizer

    def decode(tokens: list[int]) -> str:
        return "" if tokenizer is None else str(tokenizer.decode(tokens))

    for each, params, size in itertools.product(workloads, sampling, sizes):
        cell = make_cell(each.name, each.prompts, size, rounds)
        refusals = {c.name: c.refusal(size, params) for c in contenders}
        left_out = {name: why for name, why in refusals.items() if why is not None}
        able = [c for c in contenders if c.name not in left_out]
        turns = len(able) * (rounds + WARM_UP_TURNS) + learning_turns * sum(c.learns for c in able)
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
            title = f"{each.name}, T {params.temperature:g}, batch {size}"
            on_turn = partial(_advance, bar, task, title)
            results = compete(cell, contenders, params, learning_turns, on_turn)
        figures = figures_of_cell(cell, results, parameters, params.temperature, left_out)
        show_cell(console, figures)
        write_answers(output, cell, params.temperature, results, each.categories, decode)
        yield figures


def _parameters(llm: LLM) -> Parameters:
    models = llm.target, llm.draft, llm.companion
    return Parameters(*(0 if model is None else model.num_parameters for model in models))


def _advance(bar: Progress, task: TaskID, title: str, name: str) -> None:
    bar.update(task, advance=1, description=f"{title}: {name}")
