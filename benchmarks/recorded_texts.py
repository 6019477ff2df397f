"""Files of recorded answers and of the pass times that were measured with them.

They are written by the ``record`` command of a benchmark and read by its ``replay`` command.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np

from draftwise.core.latency import LatencyModel
from draftwise.core.stage_cost import StageCost

STAGES = "target", "draft"
# The arrays of each answer, by workload and temperature.
Texts = dict[tuple[str, float], list[dict[str, Any]]]


def add_recording_options(
    parser: ArgumentParser, num_prompts: int, longest_prompt: int, max_tokens: int
) -> None:
    """The arguments of ``record``: the file, the models and the prompts."""
    parser.add_argument("texts", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--target", default="zoo:target@200m")
    parser.add_argument("--draft", default="zoo:draft")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-prompts", type=int, default=num_prompts)
    parser.add_argument("--longest-prompt", type=int, default=longest_prompt)
    parser.add_argument("--max-tokens", type=int, default=max_tokens)


def cost_arrays(latency: LatencyModel) -> dict[str, Any]:
    """Measured costs as arrays. A draft without a model costs nothing."""
    costs = {stage: getattr(latency, stage) for stage in STAGES}
    return {
        stage: [
            cost.tokens,
            cost.seconds,
            [cost.first_extra] * len(cost.tokens),
            [cost.per_context_token] * len(cost.tokens),
        ]
        if cost
        else [[1.0], [0.0], [0.0], [0.0]]
        for stage, cost in costs.items()
    }


def text_key(workload: str, temperature: float, index: int, field: str) -> str:
    """The name of one array of one answer."""
    return f"{workload}/{temperature}/{index}/{field}"


def read_texts(path: Path) -> tuple[list[StageCost], Texts]:
    """The costs of target and draft, and the answers in their order."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    costs = []
    for stage in STAGES:
        # Older files have no first pass, and others no cost of the context.
        tokens, seconds, *others = arrays.pop(stage).tolist()
        first_extra, per_context_token = [*(row[0] for row in others), 0.0, 0.0][:2]
        costs.append(StageCost(tuple(tokens), tuple(seconds), per_context_token, first_extra))
    found: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for name, values in arrays.items():
        workload, temperature, index, field = name.split("/")
        answers = found.setdefault((workload, float(temperature)), {})
        answers.setdefault(index, {})[field] = values
    return costs, {key: list(answers.values()) for key, answers in found.items()}
