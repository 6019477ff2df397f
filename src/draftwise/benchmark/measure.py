"""Timed runs, and the comparison of speculative with target-only decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from draftwise.engine.request import Request
from draftwise.errors import (
    CacheExhaustedError,
    InvalidParameterError,
    NumericalError,
    PromptError,
)
from draftwise.llm import LLM
from draftwise.outputs import FinishReason, RequestOutput, SpeculationStats
from draftwise.params import SamplingParams
from draftwise.prompts import Prompt

OnStep = Callable[[list[Request]], None]

_WARM_UP_TOKENS = 8
# Errors of single prompts. All others end a run.
_OF_A_PROMPT = (PromptError, InvalidParameterError, CacheExhaustedError, NumericalError)


@dataclass
class Run:
    """Answers and the time they took.

    Attributes:
        outputs: one per prompt.
        seconds: wall time including prefill, summed over the parts of the run.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of wall time."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def stats(self) -> SpeculationStats:
        """Sum of the speculation statistics of all prompts."""
        total = SpeculationStats()
        for output in self.outputs:
            total.add(output.speculation)
        return total


@dataclass(frozen=True)
class Comparison:
    """Target-only and speculative decoding of the same prompts.

    Attributes:
        target_only: run of the target without speculation.
        speculative: run with speculation.
        greedy: whether every prompt was decoded at temperature 0, so that texts should be equal.
    """

    target_only: Run
    speculative: Run
    greedy: bool

    @property
    def speedup(self) -> float:
        """Ratio of tokens per second, speculative over target-only."""
        return self.speculative.tokens_per_second / self.target_only.tokens_per_second

    @property
    def num_compared(self) -> int:
        """Number of prompts that failed in neither run."""
        return len(self._pairs)

    @property
    def num_identical(self) -> int:
        """Number of these prompts whose two answers are identical, token for token."""
        return sum(a.token_ids == b.token_ids for a, b in self._pairs)

    @property
    def _pairs(self) -> list[tuple[RequestOutput, RequestOutput]]:
        pairs = zip(self.target_only.outputs, self.speculative.outputs, strict=True)
        return [(a, b) for a, b in pairs if a.error is None and b.error is None]


def timed_generate(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    on_step: OnStep | None = None,
) -> Run:
    """Generate for all prompts and measure the wall time."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, on_step)
    return Run(outputs, time.perf_counter() - start)


def warm_up(llm: LLM, prompts: Sequence[Prompt]) -> None:
    """Generate a few tokens, so that one-time costs are not part of the measurement.

    Args:
        llm: the LLM to warm up.
        prompts: prompts to choose from. The first one that does not fail is used.
    """
    for prompt in prompts:
        try:
            llm.generate([prompt], SamplingParams(max_tokens=_WARM_UP_TOKENS, temperature=0))
        except _OF_A_PROMPT:
            continue
        return


def compare(
    speculative: LLM,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    batch_size: int,
    on_step: OnStep | None = None,
    on_turn: Callable[[LLM], None] = lambda _: None,
) -> Comparison:
    """Decode the same prompts with and without speculation.

    The two runs are interleaved batch by batch, and their order alternates, so that a change in the
    machine's speed affects both equally.

    Args:
        speculative: LLM with speculation. Target-only decoding uses the same weights.
        prompts: one or more prompts.
        params: sampling parameters of each prompt.
        batch_size: number of prompts per turn.
        on_step: called after each step of either run.
        on_turn: called before each turn with the LLM of that turn.

    Raises:
        DraftwiseError: every prompt failed in one of the runs; the first error is raised.
    """
    target_only = speculative.with_speculation(None)
    runs = {id(llm): Run() for llm in (target_only, speculative)}
    for llm in (target_only, speculative):
        warm_up(llm, prompts)
    order = [target_only, speculative]
    for start in range(0, len(prompts), batch_size):
        part = slice(start, start + batch_size)
        for llm in order:
            on_turn(llm)
            begin = time.perf_counter()
            outputs = _outputs(llm, prompts[part], params[part], on_step)
            runs[id(llm)].outputs.extend(outputs)
            runs[id(llm)].seconds += time.perf_counter() - begin
        order.reverse()
    for run in runs.values():
        errors = [output.error for output in run.outputs]
        if errors[0] is not None and all(errors):
            raise errors[0]
    greedy = all(each.temperature == 0 for each in params)
    return Comparison(runs[id(target_only)], runs[id(speculative)], greedy)


def _outputs(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    on_step: OnStep | None,
) -> list[RequestOutput]:
    """The outputs of all prompts, also if every prompt fails."""
    try:
        return llm.generate(prompts, params, on_step)
    except _OF_A_PROMPT as error:
        if len(prompts) == 1:
            return [RequestOutput.empty(prompts[0], FinishReason.ERROR, error)]
    # The error is that of the first prompt only, so each prompt is run alone.
    pairs = zip(prompts, params, strict=True)
    return [each for prompt, own in pairs for each in _outputs(llm, [prompt], [own], on_step)]


def with_seeds(params: SamplingParams, num_prompts: int) -> list[SamplingParams]:
    """Return the parameters for every prompt; the seed increases by one from prompt to prompt."""
    if params.seed is None:
        return [params] * num_prompts
    return [replace(params, seed=params.seed + i) for i in range(num_prompts)]
