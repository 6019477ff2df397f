"""Model cards of the bundled family, generated from the metrics of the training runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from draftwise.zoo.recipe import Stage
from draftwise.zoo.training import CONTINUATIONS, MTP_WEIGHT

_SOURCES = {
    "stdlib": ("standard library of Python, without its tests", "PSF-2.0"),
    "tests": ("test suite of Python's standard library", "PSF-2.0"),
    "docs": ("Python language reference (`pydoc_data.topics`)", "PSF-2.0"),
    "gsm8k": ("GSM8K, training questions", "MIT"),
    "mbpp": ("MBPP, training tasks 601-974", "CC-BY-4.0"),
}

_ROLES = {
    "target": "The target of the family: the model whose distribution speculation preserves.",
    "draft": "The draft of the family: a small model distilled from the target.",
    "companion": (
        "The companion of the family: a second small model, which scores the drafted tokens.\n"
        "It differs from the draft in shape, seed and order of the data. As both are distilled\n"
        "from the same target, they are not independent. The spare is independent, but weaker."
    ),
    "spare": "A third small model, of another shape, seed and data order; trained on text only.",
    "mid": "A model between draft and target in size, distilled from the target.",
    "hybrid": (
        "A target with recurrent layers and a draft of its own (MTP), distilled from the target.\n"
        "It began with weights of the target: embeddings, feed-forward blocks and projections of\n"
        "attention, as in The Mamba in the Llama (Wang et al. 2024, arXiv:2408.15237)."
    ),
}

_DISTILLATION = """
## Distillation

The first {text:,} tokens are ordinary training on text. The rest of the training minimises the
forward KL divergence from the target's distribution at temperature 1. {data}
"""

_CONTINUATIONS = """Its data are training text
and {number:,} continuations of training prompts, of {length} tokens each, sampled from the target
({share:.0%} of the rows, {epochs:.0f} epochs), as in DistillSpec (Zhou et al., ICLR 2024,
arXiv:2310.08461) with fixed data. The paper's on-policy variant, in which the student samples the
continuations, is not used."""


_MTP = """
The MTP layer was trained with the model, with weight {weight:g}, to give the model's own
distribution of the token after the next one. Its mean acceptance by the model, Σ min(p, q) at
temperature 1 on held-out text, is {acceptance:.3f}.
"""


def _architecture(config: PreTrainedConfig) -> str:
    if config.model_type == "llama":
        return "Llama architecture with tied embeddings"
    return (
        "Qwen3.5 architecture with tied embeddings, three layers with a gated delta net to one\n"
        "with attention, and one MTP layer"
    )


def _portable_command(command: str) -> str:
    """Return a recorded command with machine-specific folders replaced by placeholders."""
    words = shlex.split(command)
    for option, name in (("--data", "DIR"), ("--out", "RUNS")):
        for i, word in enumerate(words):
            if word == option and i + 1 < len(words):
                words[i + 1] = name
            elif word.startswith(f"{option}="):
                words[i] = f"{option}={name}"
    return " ".join(words)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _data_table(stage: Stage, metrics: Mapping[str, Any]) -> str:
    weight = sum(stage.mixture.values())
    rows = []
    for name, share in stage.mixture.items():
        text, licence = _SOURCES[name]
        epochs = metrics["epochs"][name]
        rows.append((name, text, licence, f"{share / weight:.0%}", f"{epochs:.1f}"))
    return _table(("source", "text", "licence", "share of text rows", "epochs"), rows)


def _score_table(
    stage: Stage, losses: Mapping[str, float], acceptance: Mapping[str, float] | None
) -> str:
    scored = [name for name in stage.mixture if f"loss/{name}" in losses]
    names = {"": "all, weighted by share", **{f"/{name}": name for name in scored}}
    header = ["held-out text", "loss (nats per token)"]
    rows = [[label, f"{losses['loss' + key]:.3f}"] for key, label in names.items()]
    if acceptance is not None:
        header.append("acceptance")
        for row, key in zip(rows, names, strict=True):
            row.append(f"{acceptance['acceptance' + key]:.3f}")
        continuations = acceptance["acceptance/continuations"]
        rows.append(["sampled from the target", "", f"{continuations:.3f}"])
    return _table(header, rows)


def model_card(
    stage: Stage,
    config: PreTrainedConfig,
    metrics: Mapping[str, Any],
    losses: Mapping[str, float],
    acceptance: Mapping[str, float] | None,
    mtp_acceptance: float | None = None,
    remark: str = "",
) -> str:
    """Return the README of one model.

    Args:
        stage: the model's stage.
        config: the model's configuration.
        metrics: metrics of the training run.
        losses: ``loss`` (weighted by the mixture) and ``loss/<source>`` of the shipped weights on
            held-out documents, in nats per token.
        acceptance: their ``acceptance`` and ``acceptance/<source>`` on held-out documents, and
            ``acceptance/continuations`` on text sampled from the target. ``None`` for the target.
        mtp_acceptance: the mean acceptance of the MTP layer by the model itself; ``None`` without
            one.
        remark: an additional paragraph.
    """
    name = stage.name
    explanation = ""
    if acceptance is not None:
        explanation = (
            "Acceptance is the mean over positions of Σ min(p, q), p from the bundled target and "
            "q from\nthis model, both at temperature 1.\n"
        )
    if mtp_acceptance is not None:
        explanation += _MTP.format(acceptance=mtp_acceptance, weight=MTP_WEIGHT)
    distillation = ""
    if stage.distillation is not None:
        plan, data = stage.distillation, "Its data are training text."
        if plan.continuation_share:
            data = _CONTINUATIONS.format(
                number=plan.num_continuations,
                length=plan.continuation_length,
                share=plan.continuation_share,
                epochs=metrics["epochs"][CONTINUATIONS],
            )
        distillation = _DISTILLATION.format(text=metrics["num_text_tokens"], data=data)
    notes = f"\n{remark.strip()}\n" if remark.strip() else ""
    versions = ", ".join(f"{key} {value}" for key, value in metrics["versions"].items())
    return f"""---
license: apache-2.0
language: en
library_name: transformers
tags: [draftwise, speculative-decoding]
---

# draftwise zoo:{name}

{_ROLES[name]}

{metrics["num_parameters"]:,} parameters, {metrics["num_tokens"]:,} training tokens. A toy-sized
model for studying speculation on any machine. Its text is not fit for use: it is often wrong, and
it has not been evaluated for bias or harm.

{_architecture(config)}, vocabulary {config.vocab_size}, context of
{config.max_position_embeddings} tokens: hidden size {config.hidden_size},
{config.num_hidden_layers} layers, {config.num_attention_heads} heads of {config.head_dim} with
{config.num_key_value_heads} for keys and values, MLP {config.intermediate_size}. The weights are
bfloat16.

## Data

{_data_table(stage, metrics)}

Two percent of the documents, chosen by a hash of their content, are held out and never trained
on. The test questions of GSM8K and the tasks of MBPP outside 601-974 are not among the data.

## Training

{metrics["num_steps"]:,} steps in {metrics["minutes"]:.0f} minutes on {metrics["machine"]}
({versions}), seed {stage.seed}, Muon and AdamW:

```
{_portable_command(metrics["command"])}
python -m draftwise.zoo.export --runs RUNS
```

`DIR` contains `gsm8k_train.jsonl` and `mbpp.jsonl`. The other text is part of the running Python.
{notes}{distillation}
## Scores of these weights

{_score_table(stage, losses, acceptance)}

{explanation}"""
