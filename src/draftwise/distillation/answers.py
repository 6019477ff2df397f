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
            raise _cannot("create", self._folder, error) from error

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
            raise _cannot("write", path, error) from error

    def _file(self, temperature: float) -> Path:
        return self._folder / f"{self._name}-{temperature:g}.jsonl"

    def _of(self, temperature: float) -> dict[str, tuple[int, ...]]:
        if temperature not in self._answers:
            path = self._file(temperature)
            try:
                self._answers[temperature] = _read(path)
            except OSError as error:
                raise _cannot("read", path, error) from error
        return self._answers[temperature]


def _cannot(do: str, path: Path, error: OSError) -> InvalidParameterError:
    return InvalidParameterError("answers", f"cannot {do} {str(path)!r}: {error}")


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


@dataclass(frozen=True)
class Answered:
    """Answers of a target.

    Attributes:
        answers: the finished jobs with the tokens of their answers, in the order of the jobs.
        seconds: time that generating the new ones took, without pauses of the process.
    """

    answers: list[tuple[Job, tuple[int, ...]]]
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
    done = {job: tokens for job in jobs if (tokens := cache.get(job)) is not None}
    total, spent, clock = sum(map(len, done.values())), 0.0, StepClock()
    # Requests are known by their parameters, which are distinct objects.
    asked: dict[int, Job] = {}

    def on_step(advanced: list[Request]) -> None:
        nonlocal total, spent
        spent += clock.stop()
        clock.start()
        for request in advanced:
            if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                job = asked[id(request.params)]
                done[job] = tuple(request.tokens[request.num_prompt_tokens :])
                cache.add(job, done[job])
                total += len(done[job])
        if on_progress is not None:
            on_progress(len(done), total)
        if seconds is not None and spent >= seconds:
            raise _TimeIsUpError

    waiting = [job for job in jobs if job not in done]
    while waiting and (seconds is None or spent < seconds):
        size = len(waiting)
        if num_tokens is not None:
            per_answer = max(1.0, total / len(done)) if done else max_tokens / 2
            size = min(size, math.ceil((num_tokens - total) / per_answer))
            if size <= 0:
                break
        batch, waiting = waiting[:size], waiting[size:]
        params = [
            SamplingParams(
                max_tokens=max_tokens, temperature=job.temperature, seed=int(job.key[:12], 16)
            )
            for job in batch
        ]
        asked = {id(each): job for each, job in zip(params, batch, strict=True)}
        clock.start()
        try:
            llm.generate([list(job.prompt) for job in batch], params, on_step)
        except _TimeIsUpError:
            break
        except (PromptError, CacheExhaustedError, NumericalError):
            # All prompts of this batch failed. Others may not.
            if not done:
                raise
    finished = [(job, done[job]) for job in jobs if job in done]
    if num_tokens is not None:
        finished = _first(finished, num_tokens)
    return Answered(finished, spent)


def _first(
    finished: list[tuple[Job, tuple[int, ...]]], num_tokens: int
) -> list[tuple[Job, tuple[int, ...]]]:
    total = 0
    for index, (_, tokens) in enumerate(finished):
        total += len(tokens)
        if total >= num_tokens:
            return finished[: index + 1]
    return finished
