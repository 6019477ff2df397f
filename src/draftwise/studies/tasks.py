"""Prompts by task: the groups of Spec-Bench, and one task for each other kind of file."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging as transformers_logging

from draftwise.benchmark.workload import load_workload
from draftwise.errors import PromptError
from draftwise.llm import LLM

# Spec-Bench (Xia et al. 2024) takes the eight categories of MT-Bench together.
_CONVERSATION = "multi-turn conversation"
_MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
)
GROUPS: Mapping[str, str] = {
    **dict.fromkeys(_MT_BENCH, _CONVERSATION),
    "translation": "translation",
    "summarization": "summarisation",
    "qa": "question answering",
    "math_reasoning": "mathematical reasoning",
    "rag": "retrieval-augmented",
}
_ALL = 1_000_000


@dataclass(frozen=True)
class Task:
    """Prompts of one kind.

    Attributes:
        name: as it is shown.
        prompts: as tokens.
    """

    name: str
    prompts: Sequence[list[int]]


def load_tasks(
    llm: LLM, paths: Sequence[Path], num_prompts: int, longest_prompt: int, chat: bool, seed: int
) -> list[Task]:
    """Some prompts of each task that the files hold, in the order in which tasks first occur.

    A category of Spec-Bench belongs to its group. Any other prompt's task is its file, or, where
    several files begin with the same word (``humanevalpack_java``, ``humanevalpack_cpp``), that
    word.

    Args:
        llm: whose tokenizer and chat template are used.
        paths: of JSON lines.
        num_prompts: drawn from each task; fewer where there are not so many.
        longest_prompt: in tokens; longer ones are left out.
        chat: each is one chat message of a user, where there is a chat template.
        seed: of the drawing.

    Raises:
        PromptError: a file cannot be read, or holds no prompt that is short enough.
    """
    chat = chat and bool(getattr(llm.target.tokenizer, "chat_template", None))
    tasks: dict[str, list[list[int]]] = {}
    names = file_tasks(paths)
    for path in paths:
        try:
            with _no_warnings():
                workload = load_workload(llm, path, _ALL, longest_prompt, chat)
        except PromptError as error:
            raise PromptError("prompts", error.message) from None
        for prompt, category in zip(workload.prompts, workload.categories, strict=True):
            tasks.setdefault(GROUPS.get(category, names[path]), []).append(prompt)
    drawn = []
    for name, prompts in tasks.items():
        random.Random(seed).shuffle(prompts)
        drawn.append(Task(name, prompts[:num_prompts]))
    return drawn


def file_tasks(paths: Sequence[Path]) -> dict[Path, str]:
    """The task of each file whose prompts have no category of Spec-Bench."""
    words = [path.stem.split("_")[0] for path in paths]
    return {
        path: word if words.count(word) > 1 else path.stem
        for path, word in zip(paths, words, strict=True)
    }


@contextmanager
def _no_warnings() -> Iterator[None]:
    """That a prompt is too long for the model is no news: it is left out."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
