"""The target's own answers to prompts, kept on disk across runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwise.engine.request import Request
from draftwise.errors import (
    CacheExhaustedError,
    InvalidParameterError,
    NumericalError,
    PromptError,
)
from draftwise.llm import LLM
from draftwise.outputs import FinishReason
from draftwise.params import SamplingParams
from draftwise.training.clock import StepClock
from draftwise.zoo.bundled import cache_folder

# The oldest answers of a file are dropped beyond this size.
MAX_CACHE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Job:
    """One answer to be generated.

    Attributes:
        prompt: tokens of the prompt.
        temperature: temperature at which it is answered.
        round: number of the answer, for several answers to one prompt.
    """

    prompt: tuple[int, ...]
    temperature: float
    round: int = 0

    @property
    def key(self) -> str:
        """Identifies prompt and round."""
        return hashlib.sha256(json.dumps([self.prompt, self.round]).encode()).hexdigest()[:24]


class AnswerCache:
    """Answers of one target, in one file for each temperature and length.

    A file has one JSON array per answer: its key and its tokens. Answers are appended while they
    are generated, so an interrupted run loses none.
    """

    def __init__(self, fingerprint: str, max_tokens: int, folder: Path | None = None) -> None:
        """Open the cache.

        Args:
            fingerprint: fingerprint of the target.
            max_tokens: largest number of tokens of an answer.
            folder: folder of the files; ``None`` for the user's cache folder.

        Raises:
            InvalidParameterError: the folder cannot be written.
        """
        self._folder = folder or cache_folder() / "answers"
        self._name = f"{fingerprint}-{max_tokens}"
        self._answers: dict[float, dict[str, tuple[int, ...]]] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidParameterError(
                "answers", f"cannot create {str(self._folder)!r}: {error}"
            ) from error

    def get(self, job: Job) -> tuple[int, ...] | None:
        """Tokens of an answer; ``None`` if it was not generated yet.

        Raises:
            InvalidParameterError: the file of the answers cannot be read.
        """
        return self._of(job.temperature).get(job.key)

    def add(self, job: Job, tokens: Sequence[int]) -> None:
        """Append an answer.

        Raises:
            InvalidParameterError: the file of the answers cannot be written.
        """
        self._of(job.temperature)[job.key] = tuple(tokens)
        path = self._file(job.temperature)
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([job.key, list(tokens)], separators=(",", ":")) + "\n")
        except OSError as error:
            raise InvalidParameterError(
                "answers", f"cannot write {str(path)!r}: {error}"
            ) from error

    def _file(self, temperature: float) -> Path:
        return self._folder / f"{self._name}-{temperature:g}.jsonl"

    def _of(self, temperature: float) -> dict[str, tuple[int, ...]]:
        if temperature not in self._answers:
            path = self._file(temperature)
            try:
                self._answers[temperature] = _read(path)
            except OSError as error:
                raise InvalidParameterError(
                    "answers", f"cannot read {str(path)!r}: {error}"
                ) from error
        return self._answers[temperature]


def _read(path: Path) -> dict[str, tuple[int, ...]]:
    """Answers of a file. A last line that was cut off is left out."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    size = path.stat().st_size
    if size > MAX_CACHE_BYTES:
        lines = lines[len(lines) // 2 :]
    answers: dict[str, tuple[int, ...]] = {}
    kept = []
    for line in lines:
        try:
            key, tokens = json.loads(line)
            answers[key] = tuple(tokens)
            kept.append(line)
        except (ValueError, TypeError):
            continue
    if len(kept) < len(lines) or size > MAX_CACHE_BYTES:
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
    return answers


Answers = list[tuple[Job, tuple[int, ...]]]


@dataclass(frozen=True)
class Answered:
    """Answers of a target.

    Attributes:
        answers: the finished jobs with the tokens of their answers, in the order of the jobs.
        seconds: time that generating the new ones took, without pauses of the process.
    """

    answers: Answers
    seconds: float


class _TimeIsUpError(Exception):
    """Ends a call of ``LLM.generate`` whose time is over."""


def answer(
    llm: LLM,
    jobs: Sequence[Job],
    cache: AnswerCache,
    max_tokens: int,
    *,
    num_tokens: int | None = None,
    seconds: float | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Answered:
    """Answer prompts in the order of the jobs, with answers of earlier runs where there are some.

    Args:
        llm: the target, with a draft that needs no model.
        jobs: the answers to generate.
        cache: answers of earlier runs; new ones are added.
        max_tokens: largest number of tokens of an answer.
        num_tokens: stop when the answers of the first jobs have this many tokens.
        seconds: stop after this time, in which pauses of the process do not count.
        on_progress: called with the numbers of answers and of their tokens.

    Returns:
        The finished answers. With ``num_tokens``, those of the smallest number of first jobs that
        has as many tokens.

    Raises:
        DraftwiseError: all prompts failed.
    """
    known = {job: tokens for job in jobs if (tokens := cache.get(job)) is not None}
    run = _Run(llm, cache, max_tokens, seconds, known, on_progress)
    waiting = [job for job in jobs if job not in known]
    while waiting and not run.is_over:
        size = len(waiting)
        if num_tokens is not None:
            missing = num_tokens - run.num_tokens
            size = min(size, math.ceil(missing / run.tokens_per_answer))
            if size <= 0:
                break
        batch, waiting = waiting[:size], waiting[size:]
        run.generate(batch)
    finished = [(job, run.done[job]) for job in jobs if job in run.done]
    if num_tokens is not None:
        finished = _first(finished, num_tokens)
    return Answered(finished, run.seconds)


def _first(finished: Answers, num_tokens: int) -> Answers:
    total = 0
    for index, (_, tokens) in enumerate(finished):
        total += len(tokens)
        if total >= num_tokens:
            return finished[: index + 1]
    return finished


class _Run:
    """Answers that are being generated."""

    def __init__(
        self,
        llm: LLM,
        cache: AnswerCache,
        max_tokens: int,
        seconds: float | None,
        known: dict[Job, tuple[int, ...]],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self.done = known
        self.num_tokens = sum(map(len, known.values()))
        self._llm = llm
        self._cache = cache
        self._max_tokens = max_tokens
        self.seconds = 0.0
        self._limit = seconds
        self._clock = StepClock()
        self._on_progress = on_progress
        self._jobs: dict[int, Job] = {}

    @property
    def is_over(self) -> bool:
        return self._limit is not None and self.seconds >= self._limit

    @property
    def tokens_per_answer(self) -> float:
        return max(1.0, self.num_tokens / len(self.done)) if self.done else self._max_tokens / 2

    def generate(self, batch: Sequence[Job]) -> None:
        params = [
            SamplingParams(
                max_tokens=self._max_tokens,
                temperature=job.temperature,
                seed=int(job.key[:12], 16),
            )
            for job in batch
        ]
        # Requests are known by their parameters, which are distinct objects.
        self._jobs = {id(each): job for each, job in zip(params, batch, strict=True)}
        self._clock.start()
        try:
            self._llm.generate([list(job.prompt) for job in batch], params, self._on_step)
        except _TimeIsUpError:
            return
        except (PromptError, CacheExhaustedError, NumericalError):
            # All prompts of this batch failed. Others may not.
            if not self.done:
                raise

    def _on_step(self, advanced: list[Request]) -> None:
        self.seconds += self._clock.stop()
        self._clock.start()
        for request in advanced:
            if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                tokens = tuple(request.tokens[request.num_prompt_tokens :])
                job = self._jobs[id(request.params)]
                self._cache.add(job, tokens)
                self.done[job] = tokens
                self.num_tokens += len(tokens)
        if self._on_progress is not None:
            self._on_progress(len(self.done), self.num_tokens)
        if self.is_over:
            raise _TimeIsUpError
