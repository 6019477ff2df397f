"""Choosing SVIP's threshold h on held-out samples.

Recomputes how SVIP's threshold is chosen (Zhang et al. 2024, section 4: on a few held-out samples,
once per pair of models). The source found that one threshold, chosen on few samples, serves all
tasks, and that the speed is not sensitive to it around the best value.

Recorded drafts of the longest length are cut where each h would have stopped; the tokens gained are
expectations, and the time is that of measured passes for one request. Half of the prompts choose,
the other half judges.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from draftwise.benchmark.style import COLOURS, look
from draftwise.core.latency import LatencyModel
from draftwise.errors import InvalidParameterError
from draftwise.estimators.records import Records
from draftwise.studies.drawing import panels, styled
from draftwise.studies.positions import Floats, Integers
from draftwise.studies.study import SVIP, Account, Data, Finding, Study
from draftwise.studies.workbench import Workbench

# That of the authors' code, in the paper's form.
THEIR_THRESHOLD = 0.77
THRESHOLDS = tuple(sorted({THEIR_THRESHOLD, *np.round(np.linspace(0.0, 2.5, 51), 3).tolist()}))
_LONGEST = 10
_CONTEXT = 200


def chains_of(records: Records, length: int) -> tuple[Floats, Floats]:
    """Drafts of at least so many tokens, cut to it.

    Returns:
        ``[chains, length]`` entropies and acceptance probabilities.
    """
    ends = np.flatnonzero(np.diff(records.chain)) + 1
    parts = zip(np.split(records.entropy, ends), np.split(records.acceptance, ends), strict=True)
    whole = [(h[:length], a[:length]) for h, a in parts if len(h) >= length]
    if not whole:
        return np.empty((0, length)), np.empty((0, length))
    entropy, acceptance = zip(*whole, strict=True)
    return np.stack(entropy).astype(float), np.stack(acceptance).astype(float)


def svip_lengths(entropy: Floats, threshold: float) -> Integers:
    """``[chains]`` tokens drafted: up to the first from a distribution with √H > h, included."""
    over = np.sqrt(entropy) > threshold
    length = entropy.shape[1]
    lengths: Integers = np.where(over.any(axis=1), over.argmax(axis=1) + 1, length)
    return lengths


def goodput(lengths: Integers, acceptance: Floats, latency: LatencyModel) -> float:
    """Tokens per second of one request whose drafts have these lengths.

    Args:
        lengths: ``[chains]``.
        acceptance: ``[chains, length]`` of each token given those before.
        latency: what passes cost.
    """
    reach = np.cumprod(acceptance, axis=1)
    drafted = np.arange(acceptance.shape[1]) < lengths[:, None]
    tokens = 1.0 + float((reach * drafted).sum(axis=1).mean())
    by_length = np.bincount(lengths, minlength=1) / len(lengths)
    seconds = sum(
        share * (latency.target_seconds(1.0 + n, _CONTEXT) + n * latency.draft_seconds(1))
        for n, share in enumerate(by_length)
        if share
    )
    return float(tokens / seconds)


def figures_of(records: Records, latency: LatencyModel) -> dict[str, Any]:
    """All figures of recorded drafts.

    Raises:
        InvalidParameterError: fewer than two drafts are long enough.
    """
    entropy, acceptance = chains_of(records, _LONGEST)
    if len(entropy) < 2:
        raise InvalidParameterError(
            "max_tokens",
            f"too few for two drafts of {_LONGEST} tokens; raise it or give more prompts",
        )
    half = len(entropy) // 2
    alone = goodput(np.zeros(len(entropy), dtype=np.int64), acceptance, latency)
    curves: dict[str, list[float]] = {}
    fixed: dict[str, list[float]] = {}
    for name, part in (("chosen on", slice(half)), ("held out", slice(half, None))):
        h, a = entropy[part], acceptance[part]
        curves[name] = [goodput(svip_lengths(h, t), a, latency) / alone for t in THRESHOLDS]
        fixed[name] = [goodput(np.full(len(h), n), a, latency) / alone for n in range(_LONGEST + 1)]
    at = int(np.argmax(curves["chosen on"]))
    length = int(np.argmax(fixed["chosen on"]))
    held = curves["held out"]
    near = [v for t, v in zip(THRESHOLDS, held, strict=True) if abs(t - THRESHOLDS[at]) <= 0.25]
    return {
        "num_drafts": len(entropy),
        "longest": _LONGEST,
        "thresholds": list(THRESHOLDS),
        "svip": curves,
        "fixed": fixed,
        "chosen": THRESHOLDS[at],
        "held_out_speedup": held[at],
        "best_in_hindsight": THRESHOLDS[int(np.argmax(held))],
        "best_held_out_speedup": max(held),
        "lowest_near": min(near),
        "chosen_length": length,
        "held_out_speedup_fixed": fixed["held out"][length],
        "mean_length": float(svip_lengths(entropy, THRESHOLDS[at]).mean()),
        "draft_cost": latency.draft_seconds(1) / latency.target_seconds(1, _CONTEXT),
    }


class Threshold(Study):
    """Speed over SVIP's threshold, on samples that choose it and on others."""

    name = "threshold"
    title = "Choosing SVIP's threshold"
    source = SVIP
    timed = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """From recorded drafts and timed passes."""
        records = bench.collection(num_speculative_tokens=_LONGEST).records
        return figures_of(records, bench.latency)

    @styled
    def draw(self, data: Data) -> Figure:
        """Both halves, with fixed lengths beside."""
        figure, (svip, fixed) = panels(2, sharey=True)
        for number, (name, values) in enumerate(data["svip"].items()):
            own = look(number) | {"markevery": 5}
            svip.plot(data["thresholds"], values, label=f"half: {name}", **own)
        svip.axvline(data["chosen"], color="#777777", linewidth=1, linestyle=":")
        svip.set_xlabel("threshold h, √nats (dotted: the chosen one)")
        svip.set_ylabel("speed, × target alone (one request)")
        svip.set_title("SVIP")
        svip.legend(frameon=False)
        for number, (name, values) in enumerate(data["fixed"].items()):
            fixed.plot(range(len(values)), values, label=name, **look(number))
        fixed.axhline(data["held_out_speedup"], color=COLOURS[2], linewidth=1)
        fixed.set_xlabel("draft length, tokens (line: SVIP, held out)")
        fixed.set_title("fixed length")
        return figure

    def tell(self, data: Data) -> Account:
        """What was chosen and what it is worth elsewhere."""
        h, there = data["chosen"], data["held_out_speedup"]
        best, fixed = data["best_held_out_speedup"], data["held_out_speedup_fixed"]
        default = data["svip"]["held out"][data["thresholds"].index(THEIR_THRESHOLD)]
        text = (
            f"On one half of {data['num_drafts']} drafts h = {h:g} is best (drafts of "
            f"{data['mean_length']:.1f} tokens on average); on the other half it gives "
            f"{there:.2f} times the speed of the target alone, where the best one in hindsight, "
            f"{data['best_in_hindsight']:g}, gives {best:.2f}, h = {THEIR_THRESHOLD} "
            f"{default:.2f}, and the fixed length {data['chosen_length']}, chosen likewise, "
            f"{fixed:.2f}. A draft pass costs {data['draft_cost']:.2f} of a pass of the "
            "target here."
        )
        return Account(
            text,
            [
                Finding.of(
                    "A threshold chosen on few held-out samples serves elsewhere.",
                    f"{there:.2f} of the possible {best:.2f}",
                    there > 0.98 * best,
                ),
                Finding.of(
                    "Around the best value the speed hardly depends on it.",
                    f"within 0.25 of it the lowest is {data['lowest_near']:.2f}",
                    data["lowest_near"] > 0.95 * best,
                ),
                Finding.of(
                    "SVIP is faster than a fixed length.",
                    f"{there:.2f} against {fixed:.2f} of the best fixed length "
                    f"({data['chosen_length']})",
                    there > 1.01 * fixed,
                ),
            ],
        )
