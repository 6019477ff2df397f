"""Prompts for measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftwise.errors import PromptError
from draftwise.llm import LLM
from draftwise.prompts import load_prompts


@dataclass(frozen=True)
class Workload:
    """Prompts of one file.

    Attributes:
        name: of the file.
        prompts: as tokens.
        categories: of each prompt; the workload's name where the file has none.
    """

    name: str
    prompts: list[list[int]]
    categories: list[str]


def load_workload(
    llm: LLM, path: Path, num_prompts: int, longest_prompt: int, chat: bool
) -> Workload:
    """The first prompts of a file that are short enough.

    Args:
        llm: whose tokenizer and chat template are used.
        path: of JSON lines; see :func:`draftwise.prompts.load_prompts`.
        num_prompts: at most so many.
        longest_prompt: in tokens; longer ones are left out.
        chat: each is one chat message of a user.

    Raises:
        PromptError: the file cannot be read, or all of its prompts are too long.
    """
    texts = load_prompts(path)
    prompts: list[list[int]] = []
    categories: list[str] = []
    for text, category in zip(texts, _categories(path), strict=True):
        if len(prompts) == num_prompts:
            break
        ids = list(llm.tokenize([{"role": "user", "content": text}] if chat else text))
        if len(ids) <= longest_prompt:
            prompts.append(ids)
            categories.append(category)
    if not prompts:
        raise PromptError(
            "workload", f"no prompt of {str(path)!r} is within {longest_prompt} tokens"
        )
    return Workload(path.stem, prompts, categories)


def chat_prompts(
    llm: LLM, paths: Sequence[Path], num_prompts: int, longest_prompt: int
) -> list[list[int]]:
    """Token ids of prompts, each as one chat message of a user.

    Args:
        llm: whose chat template is used.
        paths: files of prompts.
        num_prompts: of each file, the first that are short enough.
        longest_prompt: in tokens; longer ones are left out.
    """
    return [
        prompt
        for path in paths
        for prompt in load_workload(llm, path, num_prompts, longest_prompt, chat=True).prompts
    ]


def _categories(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [str(json.loads(line).get("category", path.stem)) for line in lines if line.strip()]
