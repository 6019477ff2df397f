"""The model card of a trained draft or companion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEMPLATE = """---
base_model: {target}
pipeline_tag: text-generation
tags:
- speculative-decoding
---

# {title}

{introduction}

{role}

## Use

```python
from draftwise import LLM, SpeculationConfig

llm = LLM("{target}", SpeculationConfig({speculation}))
```

## Licence

The {noun} is distilled from the target: from its hidden states, its distributions and its answers.
It inherits the terms of use of `{target}`. Read them before you share this folder.

## Training

The target answered the prompts itself, and the {noun} was trained to match its distribution.

| | |
|---|---|
{facts}

## Acceptance on held-out prompts

{acceptance}

Mean accepted length is the mean number of tokens that a step with {num_drafted} drafted tokens
gains{as_draft}, {measured}
{comparison}"""

_BY_DISTRIBUTIONS = (
    "from the distributions of {noun} and target along held-out answers. At temperatures\n"
    "above 0 it is an estimate."
)
_BY_TOKENS = "if the draft proposes its most likely tokens, along held-out answers."

_COMPARISON = """
## What it knows of the draft

{table}

p is the target's distribution, q the draft's and c that of the companion, at the temperature of the
answers, or at 1 where that is 0. S = Σ min(q, c), and A = min(1, c(x)/q(x)) for a drafted token x.
r is the correlation of A with the probability that the target accepts x. The gains are the
information about acceptance, of S and A and of q(x), which needs no companion. The entropy of
acceptance is the most that can be known.
"""

_CONFIDENCE = """
## Confidence

Calibration error of the estimated probabilities that the first tokens of a draft are all accepted:
{confidence_error_raw:.3f} as trained, and {confidence_error:.3f} with a temperature for each token.
The temperatures were chosen on the held-out answers. They are `confidence_temperatures` in
`config.json`.
"""

# Heading of each column of a table, and the name of the figure in ``training.json``.
_ACCEPTANCE = {
    "mean accepted length": "accepted_length",
    "acceptance of the first token": "acceptance",
    "mean Σ min(p, c)": "target_overlap",
}
_DRAFT = {
    "draft's mean accepted length": "draft_accepted_length",
    "draft's mean Σ min(p, q)": "draft_target_overlap",
    "mean S": "overlap",
    "r": "correlation",
    "gain of S and A, bits": "information",
    "gain of q(x), bits": "draft_information",
    "entropy, bits": "entropy",
    "tokens": "num_tokens",
}


@dataclass(frozen=True)
class CardTexts:
    """Texts of the model card.

    Attributes:
        title: title of the card.
        introduction: what was trained.
        role: what it does in speculative decoding, in a sentence.
        speculation: arguments of ``SpeculationConfig`` that use the folder.
        noun: ``"draft"`` or ``"companion"``.
        is_one_hot: whether the acceptance is that of one-hot proposals.
    """

    title: str
    introduction: str
    role: str = (
        "The target checks every proposed token, so a draft changes the speed of the output and "
        "not its\ndistribution."
    )
    speculation: str = 'draft="path/of/this/folder"'
    noun: str = "draft"
    is_one_hot: bool = False


def card(
    texts: CardTexts, summary: Mapping[str, Any], evaluation: Mapping[str, float], num_drafted: int
) -> str:
    """The text of ``README.md``.

    Args:
        texts: texts of the kind of draft.
        summary: the entry ``"run"`` of ``training.json``.
        evaluation: what was measured at the end of the run.
        num_drafted: draft length of the acceptance.
    """
    facts = {
        "prompts": ", ".join(summary["prompts"]),
        "texts": ", ".join(summary["texts"]) or "none",
        "tokens of answers and texts": f"{summary['num_data_tokens']:,}",
        f"share of them that the {texts.noun} can propose": f"{summary['coverage']:.2%}",
        "training tokens": f"{summary['num_tokens']:,} ({summary['epochs']:.1f} epochs)",
        "optimiser steps": f"{summary['num_steps']:,}",
        "minutes of training": f"{summary['minutes']:.1f}",
        "loss": summary["loss"],
        "machine": summary["machine"],
    }
    if "draft" in summary:
        facts["draft that it scores"] = (
            f"`{summary['draft']}`, {summary['draft_parameters']:,} parameters"
        )
    comparison = _table(evaluation, _DRAFT)
    confidence = _CONFIDENCE.format(**evaluation) if "confidence_error" in evaluation else ""
    return _TEMPLATE.format(
        target=summary["target"],
        title=texts.title,
        introduction=texts.introduction,
        role=texts.role,
        speculation=texts.speculation,
        noun=texts.noun,
        as_draft=" with the companion as its draft" if texts.noun == "companion" else "",
        facts="\n".join(f"| {name} | {value} |" for name, value in facts.items()),
        acceptance=_table(evaluation, _ACCEPTANCE) or "Not measured.",
        num_drafted=num_drafted,
        measured=_BY_TOKENS if texts.is_one_hot else _BY_DISTRIBUTIONS.format(noun=texts.noun),
        comparison=(_COMPARISON.format(table=comparison) if comparison else "") + confidence,
    )


def _table(evaluation: Mapping[str, float], columns: Mapping[str, str]) -> str:
    """A row for each temperature, and the columns that were measured; empty if none was."""
    measured = {name.partition("/")[0] for name in evaluation}
    shown = {heading: name for heading, name in columns.items() if name in measured}
    temperatures = [
        each
        for each in dict.fromkeys(name.partition("/")[2] for name in evaluation)
        if any(f"{name}/{each}" in evaluation for name in shown.values())
    ]
    if not temperatures:
        return ""
    lines = [f"| temperature | {' | '.join(shown)} |", "|---" * (len(shown) + 1) + "|"]
    for each in temperatures:
        values = [_shown(name, evaluation.get(f"{name}/{each}")) for name in shown.values()]
        lines.append(f"| {each.removeprefix('T=')} | {' | '.join(values)} |")
    return "\n".join(lines)


def _shown(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "num_tokens":
        return f"{value:,.0f}"
    return f"{value:.2f}" if name.endswith("length") else f"{value:.3f}"
