"""Prompts grouped by task: the groups of Spec-Bench, and one task per other dataset."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwise.benchmark.workload import load_workload
from draftwise.checkpoints.quiet import quiet_transformers
from draftwise.errors import PromptError
from draftwise.llm import LLM

# Spec-Bench (Xia et al. 2024) groups the eight categories of MT-Bench.
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
    """Prompts of one task.

    Attributes:
        name: name in the report.
        prompts: token ids of each prompt.
    """

    name: str
    prompts: Sequence[list[int]]


def load_tasks(
    llm: LLM, paths: Sequence[Path], num_prompts: int, longest_prompt: int, chat: bool, seed: int
) -> list[Task]:
    """Sample prompts of each task in the files, in the order in which the tasks first occur.

    The task of a prompt with a Spec-Bench category is the group of that category. The task of any
    other prompt is its file name. Files whose names begin with the same word
    (``humanevalpack_java``, ``humanevalpack_cpp``) form one task named after that word.

    Args:
        llm: provides the tokenizer and the chat template.
        paths: JSON Lines files.
        num_prompts: maximum number of prompts per task.
        longest_prompt: maximum number of prompt tokens; longer prompts are skipped.
        chat: wrap each prompt as a user message, if the tokenizer has a chat template.
        seed: seed of the sampling.

    Raises:
        PromptError: a file cannot be read, or contains no prompt that is short enough.
    """
    chat = chat and bool(getattr(llm.target.tokenizer, "chat_template", None))
    tasks: dict[str, list[list[int]]] = {}
    names = file_tasks(paths)
    for path in paths:
        try:
            with quiet_transformers():
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
    """The task of each file, for prompts without a Spec-Bench category."""
    words = [path.stem.split("_")[0] for path in paths]
    return {
        path: word if words.count(word) > 1 else path.stem
        for path, word in zip(paths, words, strict=True)
    }
