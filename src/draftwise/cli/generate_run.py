"""Runs of ``draftwise generate``: generate outputs, print them and describe them as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeVar

from rich.console import Console

from draftwise.benchmark.measure import OnStep, Run, compare, timed_generate, with_seeds
from draftwise.cli.comparison_view import comparison_view
from draftwise.cli.interruption import interruptible, reader_may_be_gone
from draftwise.cli.live import AnswerPrinter, Answers, progress
from draftwise.cli.render import (
    SPECULATIVE,
    TARGET_ONLY,
    describe,
    show_comparison,
    show_summary,
)
from draftwise.engine.request import Request
from draftwise.errors import DraftwiseError
from draftwise.llm import LLM
from draftwise.outputs import FinishReason
from draftwise.params import SamplingParams
from draftwise.prompts import Prompt

Result = TypeVar("Result")
Rename = Callable[[DraftwiseError], None]


@dataclass(frozen=True)
class Generated:
    """The result of a run.

    Attributes:
        result: settings, outputs and timing as one JSON-serialisable object.
        interrupted: whether the user interrupted the run, which cancels unfinished requests.
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

    Ctrl-C ends the run between two steps. The text generated until then is printed.

    Args:
        console: console to print to.
        llm: the loaded models.
        prompts: one or more prompts.
        params: sampling parameters of the first prompt; the seed increases by 1 per prompt.
        rename: called with the error of each failed prompt, to name flags instead of parameters.
    """
    each = _params_per_prompt(params, prompts)
    answers = Answers(prompts, each)
    alone = len(prompts) == 1 and console.is_terminal
    printer = AnswerPrinter(console, answers, prompts, titles=not alone)
    # Text cannot be streamed below a progress bar.
    is_streaming = alone or not console.is_terminal
    start = perf_counter()
    with progress(console, "generating", len(prompts), is_streaming) as advance:

        def on_step(advanced: list[Request]) -> None:
            answers.on_step(advanced)
            if is_streaming:
                printer.print_new()
            else:
                advance(advanced)

        run = _until_interrupted(on_step, lambda follow: timed_generate(llm, prompts, each, follow))
    interrupted = run is None
    if run is None:
        run = Run(answers.outputs(), perf_counter() - start)
    _rename_errors(run, rename)
    with reader_may_be_gone(interrupted):
        printer.finish(run.outputs)
        show_summary(console, llm, run)
        _hint(console, llm, prompts, run)
    return Generated(describe(llm, run), interrupted)


def compare_prompts(
    console: Console,
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    batch_size: int,
    rename: Rename = lambda _: None,
) -> Generated:
    """Decode with and without speculation; print the texts and both speeds.

    Ctrl-C ends the run between two steps. The text generated with speculation until then is
    printed, without a comparison.

    Args:
        console: console to print to.
        llm: the loaded models, including a draft.
        prompts: one or more prompts.
        params: sampling parameters of the first prompt; the seed increases by 1 per prompt.
        batch_size: number of prompts that run at once.
        rename: see :func:`run_prompts`.
    """
    each = _params_per_prompt(params, prompts)
    answers = Answers(prompts, each)
    running = llm
    start = perf_counter()
    with comparison_view(console, len(prompts)) as view:

        def on_turn(other: LLM) -> None:
            nonlocal running
            running = other
            view.begin_turn(SPECULATIVE if other is llm else TARGET_ONLY)

        def on_step(advanced: list[Request]) -> None:
            if running is llm:
                answers.on_step(advanced)
            view.on_step(advanced)

        comparison = _until_interrupted(
            on_step, lambda follow: compare(llm, prompts, each, batch_size, follow, on_turn)
        )
    if comparison is None:
        run = Run(answers.outputs(), perf_counter() - start)
        with reader_may_be_gone(interrupted=True):
            AnswerPrinter(console, answers, prompts).finish(run.outputs)
        return Generated(describe(llm, run), interrupted=True)
    _rename_errors(comparison.speculative, rename)
    AnswerPrinter(console, Answers(), prompts).finish(comparison.speculative.outputs)
    show_comparison(console, llm, comparison, batch_size)
    _hint(console, llm, prompts, comparison.speculative)
    return Generated(describe(llm, comparison.speculative, comparison))


def _hint(console: Console, llm: LLM, prompts: Sequence[Prompt], run: Run) -> None:
    """Say what to do if a model that answers chats ended every text at once."""
    is_plain = all(isinstance(each, str) for each in prompts)
    is_empty = all(
        not each.text and each.finish_reason is FinishReason.STOP for each in run.outputs
    )
    if is_plain and is_empty and getattr(llm.target.tokenizer, "chat_template", None):
        console.print(
            "the target ended every text at its first token; it has a chat template: try --chat"
        )


def _rename_errors(run: Run, rename: Rename) -> None:
    for output in run.outputs:
        if output.error is not None:
            rename(output.error)


def _params_per_prompt(params: SamplingParams, prompts: Sequence[Prompt]) -> list[SamplingParams]:
    """Parameters of each prompt, as distinct objects by which the requests are identified."""
    return [replace(each) for each in with_seeds(params, len(prompts))]


def _until_interrupted(on_step: OnStep, run: Callable[[OnStep], Result]) -> Result | None:
    """Return the result of a run; ``None`` if the user interrupted it."""
    with interruptible() as interruption:

        def follow(advanced: list[Request]) -> None:
            on_step(advanced)
            interruption.check()

        try:
            return run(follow)
        except KeyboardInterrupt:
            return None
        except DraftwiseError:
            # The terminal also sends the interrupt to child processes of the engine.
            if not interruption.asked:
                raise
            return None
