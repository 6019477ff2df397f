"""The run of ``draftwise generate``: prompts to outputs, shown and as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar

from rich.console import Console

from draftwise.benchmark.measure import OnStep, Run, compare, timed_generate, with_seeds
from draftwise.cli.interruption import interruptible, reader_may_be_gone
from draftwise.cli.live import Answers, Typist, progress
from draftwise.cli.render import describe, show_comparison, show_summary
from draftwise.engine.request import Request
from draftwise.errors import DraftwiseError
from draftwise.llm import LLM
from draftwise.params import SamplingParams
from draftwise.prompts import Prompt

Result = TypeVar("Result")
Rename = Callable[[DraftwiseError], None]


@dataclass(frozen=True)
class Generated:
    """What came of a run.

    Attributes:
        result: settings, outputs and timing as one JSON-ready object.
        interrupted: the user stopped it; what had not ended is cancelled.
    """

    result: dict[str, Any]
    interrupted: bool = False


def run_prompts(
    console: Console,
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    rename: Rename = lambda _: None,
) -> Generated:
    """Generate for all prompts; print their texts and a summary.

    Ctrl-C ends the run between two steps, and what was generated until then is printed.

    Args:
        console: where to print.
        llm: loaded.
        prompts: one or more.
        params: for all of them; a seed counts up.
        rename: called with the error of each prompt that failed, to put it in the words of the
            command line.
    """
    each = _one_for_each(params, prompts)
    answers = Answers(prompts, each)
    alone = len(prompts) == 1 and console.is_terminal
    typist = Typist(console, answers, titles=not alone)
    # Below a progress bar no text can be typed.
    types_along = alone or not console.is_terminal
    start = perf_counter()
    with progress(console, "generating", len(prompts), types_along) as advance:

        def on_step(advanced: list[Request]) -> None:
            answers.on_step(advanced)
            if types_along:
                typist.type()
            else:
                advance(advanced)

        run = _until_interrupted(on_step, lambda follow: timed_generate(llm, prompts, each, follow))
    interrupted = run is None
    if run is None:
        run = Run(answers.outputs(), perf_counter() - start)
    _rename_errors(run, rename)
    with reader_may_be_gone(interrupted):
        typist.finish(run.outputs)
        show_summary(console, llm, run)
    return Generated(describe(llm, run), interrupted)


def compare_prompts(
    console: Console,
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    batch_size: int,
    rename: Rename = lambda _: None,
) -> Generated:
    """Decode with and without speculation; print texts and both speeds.

    Ctrl-C ends the run between two steps; what was generated until then with speculation is
    printed, without a comparison.

    Args:
        console: where to print.
        llm: loaded, with a draft.
        prompts: one or more.
        params: for all of them; a seed counts up.
        batch_size: prompts that run at once.
        rename: as for :func:`run_prompts`.
    """
    each = _one_for_each(params, prompts)
    answers = Answers(prompts, each)
    turn_of = llm
    start = perf_counter()

    def on_turn(other: LLM) -> None:
        nonlocal turn_of
        turn_of = other

    with progress(console, "comparing", 2 * len(prompts)) as advance:

        def on_step(advanced: list[Request]) -> None:
            if turn_of is llm:
                answers.on_step(advanced)
            advance(advanced)

        comparison = _until_interrupted(
            on_step, lambda follow: compare(llm, prompts, each, batch_size, follow, on_turn)
        )
    if comparison is None:
        run = Run(answers.outputs(), perf_counter() - start)
        with reader_may_be_gone(interrupted=True):
            Typist(console, answers).finish(run.outputs)
        return Generated(describe(llm, run), interrupted=True)
    _rename_errors(comparison.speculative, rename)
    Typist(console, Answers()).finish(comparison.speculative.outputs)
    show_comparison(console, llm, comparison, batch_size)
    return Generated(describe(llm, comparison.speculative, comparison))


def _rename_errors(run: Run, rename: Rename) -> None:
    for output in run.outputs:
        if output.error is not None:
            rename(output.error)


def _one_for_each(params: SamplingParams, prompts: Sequence[Prompt]) -> list[SamplingParams]:
    """Parameters for each prompt; an object of its own, by which its request is known."""
    return [replace(each) for each in with_seeds(params, len(prompts))]


def _until_interrupted(on_step: OnStep, run: Callable[[OnStep], Result]) -> Result | None:
    """What a run returns; ``None`` if the user interrupted it."""
    with interruptible() as interruption:

        def follow(advanced: list[Request]) -> None:
            on_step(advanced)
            interruption.check()

        try:
            return run(follow)
        except KeyboardInterrupt:
            return None
        except DraftwiseError:
            # A terminal interrupts the processes that were started for the engine as well.
            if not interruption.asked:
                raise
            return None
