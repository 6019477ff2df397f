"""The model card of a trained draft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEMPLATE = """---
base_model: {target}
pipeline_tag: text-generation
tags:
- speculative-decoding
---

# {title}

{introduction}

The target checks every proposed token, so a draft changes the speed of the output and not its
distribution.

## Use

```python
from draftwise import LLM, SpeculationConfig

llm = LLM("{target}", SpeculationConfig(draft="path/of/this/folder"))
```

## Licence

The draft is distilled from the target: from its hidden states, its distributions and its answers.
It inherits the terms of use of `{target}`. Read them before you share this folder.

## Training

The target answered the prompts itself, and the draft was trained to match its distribution.

| | |
|---|---|
{facts}

## Acceptance on held-out prompts

{acceptance}

Mean accepted length is the mean number of tokens that a step with {num_drafted} drafted tokens
gains, from the distributions of head and target along held-out answers. At temperatures above 0 it
is an estimate.
"""


def card(
    title: str,
    introduction: str,
    summary: Mapping[str, Any],
    evaluation: Mapping[str, float],
    num_drafted: int,
) -> str:
    """The text of ``README.md``.

    Args:
        title: title of the card.
        introduction: what the draft is.
        summary: the entry ``"run"`` of ``training.json``.
        evaluation: acceptance at the end of the run.
        num_drafted: draft length of the acceptance.
    """
    facts = {
        "prompts": ", ".join(summary["prompts"]),
        "texts": ", ".join(summary["texts"]) or "none",
        "tokens of answers and texts": f"{summary['num_data_tokens']:,}",
        "share of them that the draft can propose": f"{summary['coverage']:.2%}",
        "training tokens": f"{summary['num_tokens']:,} ({summary['epochs']:.1f} epochs)",
        "optimiser steps": f"{summary['num_steps']:,}",
        "minutes of training": f"{summary['minutes']:.1f}",
        "loss": summary["loss"],
        "machine": summary["machine"],
    }
    temperatures = [name.partition("/")[2] for name in evaluation if "length" in name]
    rows = [
        f"| {each.removeprefix('T=')} | {evaluation[f'accepted_length/{each}']:.2f} | "
        f"{evaluation[f'acceptance/{each}']:.3f} |"
        for each in temperatures
    ]
    head = [
        "| temperature | mean accepted length | acceptance of the first token |",
        "|---|---|---|",
    ]
    return _TEMPLATE.format(
        target=summary["target"],
        title=title,
        introduction=introduction,
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        acceptance="\n".join([*head, *rows]) if rows else "Not measured.",
        num_drafted=num_drafted,
    )
