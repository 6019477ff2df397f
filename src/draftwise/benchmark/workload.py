"""Prompts for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwise.errors import PromptError
from draftwise.llm import LLM
from draftwise.prompt_files import load_questions


@dataclass(frozen=True)
class Workload:
    """Prompts of one file.

    Attributes:
        name: name of the file, without its suffix.
        prompts: token ids of each prompt.
        categories: category of each prompt; the name of the workload if the file states none.
    """

    name: str
    prompts: list[list[int]]
    categories: list[str]


def load_workload(
    llm: LLM, path: Path, num_prompts: int, longest_prompt: int, chat: bool
) -> Workload:
    """Read the first prompts of a file that are short enough.

    Args:
        llm: provides the tokenizer and the chat template.
        path: file of prompts; see :func:`draftwise.prompt_files.load_questions`.
        num_prompts: maximum number of prompts.
        longest_prompt: maximum number of prompt tokens; longer prompts are skipped.
        chat: wrap each prompt as a user message.

    Raises:
        PromptError: the file cannot be read, or all of its prompts are too long.
    """
    prompts: list[list[int]] = []
    categories: list[str] = []
    for question in load_questions(path, field="workload"):
        if len(prompts) == num_prompts:
            break
        text = question.turns[0]
        ids = list(llm.tokenize([{"role": "user", "content": text}] if chat else text))
        if len(ids) <= longest_prompt:
            prompts.append(ids)
            categories.append(question.category)
    if not prompts:
        raise PromptError(
            "workload", f"no prompt of {str(path)!r} has at most {longest_prompt} tokens"
        )
    return Workload(path.stem, prompts, categories)


def chat_prompts(
    llm: LLM, paths: Sequence[Path], num_prompts: int, longest_prompt: int
) -> list[list[int]]:
    """Token ids of prompts, each wrapped as a user message.

    Args:
        llm: provides the tokenizer and the chat template.
        paths: files of prompts.
        num_prompts: maximum number of prompts per file.
        longest_prompt: maximum number of prompt tokens; longer prompts are skipped.
    """
    return [
        prompt
        for path in paths
        for prompt in load_workload(llm, path, num_prompts, longest_prompt, chat=True).prompts
    ]
