"""Prompts for measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from draftwise.llm import LLM
from draftwise.prompts import load_prompts


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
    prompts: list[list[int]] = []
    for path in paths:
        texts = load_prompts(path)
        ids = [list(llm.tokenize([{"role": "user", "content": text}])) for text in texts]
        prompts += [each for each in ids if len(each) <= longest_prompt][:num_prompts]
    return prompts
