"""Prompts of an audit: short ones of five kinds, bundled, or those of a file."""

from __future__ import annotations

from itertools import chain, zip_longest
from pathlib import Path

from draftwise.prompts import load_prompts

# Drafts from the text copy most in repetitions, draft models are right most in facts and code.
BUNDLED: dict[str, tuple[str, ...]] = {
    "facts": (
        "The capital of France is",
        "The opposite of hot is",
        "The largest planet of the solar system is",
        "A week has seven days, and a year has",
        "Water freezes at a temperature of",
        "The chemical symbol of gold is",
        "The sun rises in the",
        "Seven plus five is",
    ),
    "choices": (
        "Heads or tails? The coin shows",
        "Question: Is seven a prime number? Answer yes or no.\nAnswer:",
        "Pick one of the letters A, B, C and D:",
        "Rock, paper or scissors? I take",
        "The next card is red or black:",
        "Review: I liked it a lot.\nSentiment (positive or negative):",
        "Today it is sunny, rainy or cloudy:",
        "A roll of the die shows the number",
    ),
    "repetitions": (
        "red, green, blue, red, green, blue, red,",
        "ping pong ping pong ping",
        "name: Ann, age: 31\nname: Bob, age: 27\nname: Cid, age:",
        "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,",
        "A B A B B A B A B B A",
        "left right left left right left right left left",
        "Monday Tuesday Wednesday Monday Tuesday",
        "the cat sat, the dog sat, the cat ran, the dog",
    ),
    "code": (
        "def add(a, b):\n    return",
        "for i in range(10):\n    print(",
        "import numpy as",
        "SELECT name FROM users WHERE",
        "if x > 0:\n    sign = 1\nelse:\n    sign =",
        "<ul>\n<li>one</li>\n<li>two</li>\n",
        '{"name": "Ann", "age": 31, "city":',
        "public static void main(",
    ),
    "prose": (
        "Once upon a time there was a",
        "Tom has 3 apples and buys 4 more. Now he has",
        "Dear Sir or Madam,\n",
        "The train was late again, so",
        "She opened the door and",
        "To make pancakes, mix flour, eggs and",
        "It was a dark and stormy night, and",
        "In summary, the results show that",
    ),
}


def audit_prompts(path: Path | None) -> list[str]:
    """The prompts of a file, or the bundled ones, with the kinds in turn.

    Raises:
        PromptError: the file cannot be read, or has a line without a prompt.
    """
    if path is not None:
        return load_prompts(path)
    turns = chain.from_iterable(zip_longest(*BUNDLED.values()))
    return [prompt for prompt in turns if prompt is not None]
