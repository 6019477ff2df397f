"""Examinations in processes of their own, a few at a time, each with a time limit."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from .verdicts import Result, Verdict, judge

# Imported once, as this takes longer than an examination.
_IMPORTED = (
    "draftwise.llm",
    "torchao",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llava.modeling_llava",
    "tools.coverage.comparison",
)


@dataclass(frozen=True)
class Task:
    """Something to examine.

    Attributes:
        kind: what is examined.
        name: its name.
        examine: examines it in an empty folder; see :func:`tools.coverage.verdicts.judge`.
    """

    kind: str
    name: str
    examine: Callable[[Path], str]


@dataclass
class _Running:
    task: Task
    process: Any
    results: Connection
    deadline: float

    def result(self, limit_seconds: float) -> Result | None:
        """The result, if there is one or the process has ended or used up its time."""
        try:
            if self.results.poll():
                result: Result = self.results.recv()
                return result
        except EOFError:
            self.process.join()
            reason = f"the process ended with status {self.process.exitcode}"
            return Result(self.task.kind, self.task.name, Verdict.CRASHED, reason, reason)
        if time.monotonic() < self.deadline:
            return None
        reason = f"it takes more than {limit_seconds:g} seconds"
        return Result(self.task.kind, self.task.name, Verdict.CRASHED, reason, reason)

    def end(self) -> None:
        """Wait for the process, or kill it if it is still busy."""
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.results.close()


def run(tasks: Sequence[Task], workers: int, limit_seconds: float) -> Iterator[Result]:
    """Examine all tasks; the results come in the order in which they are known.

    Args:
        tasks: what to examine.
        workers: number of processes at a time.
        limit_seconds: time for each.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED])
    waiting, running = deque(tasks), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_start(context, waiting.popleft(), limit_seconds))
            wait([each.results for each in running], timeout=1)
            for each in [*running]:
                result = each.result(limit_seconds)
                if result is not None:
                    running.remove(each)
                    each.end()
                    yield result
    finally:
        for each in running:
            each.process.kill()
            each.end()


def _start(context: ForkServerContext, task: Task, limit_seconds: float) -> _Running:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_examine, args=(task, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Running(task, process, ours, time.monotonic() + limit_seconds)


def _examine(task: Task, results: Connection) -> None:
    """Run in the new process."""
    import torch
    from transformers.utils import logging as transformers_logging

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        result = judge(task.kind, task.name, lambda: task.examine(Path(folder)))
    results.send(result)
    results.close()
