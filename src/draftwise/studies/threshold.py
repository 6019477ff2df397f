"""Choice of SVIP's threshold h on held-out samples.

Recomputes the choice of SVIP's threshold (Zhang et al. 2024, section 4: on a few held-out samples,
once per pair of models). The source found that one threshold, chosen on few samples, works for all
tasks, and that the speed is insensitive to it around the best value.

Recorded drafts of the maximum length are truncated where each h would have stopped. The numbers of
tokens are expectations, and the times are measured passes of one request. The threshold is chosen
on half of the drafts and evaluated on the other half.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.benchmark.style import COLOURS, look
from draftwise.core.latency import LatencyModel
from draftwise.estimators.records import Records
from draftwise.studies.drawing import panels, styled
from draftwise.studies.positions import Floats, Integers
from draftwise.studies.study import SVIP, Data, Description, Finding, Study, too_few_tokens
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The threshold in the authors' code, converted to the paper's form.
THEIR_THRESHOLD = 0.77
THRESHOLDS = tuple(sorted({THEIR_THRESHOLD, *np.round(np.linspace(0.0, 2.5, 51), 3).tolist()}))
_MAX_LENGTH = 10
_CONTEXT = 200


def chains_of(records: Records, length: int) -> tuple[Floats, Floats]:
    """Drafts of at least ``length`` tokens, truncated to ``length``.

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
    """``[chains]`` draft lengths: up to and including the first position with √H > h."""
    over = np.sqrt(entropy) > threshold
    length = entropy.shape[1]
    lengths: Integers = np.where(over.any(axis=1), over.argmax(axis=1) + 1, length)
    return lengths


def goodput(lengths: Integers, acceptance: Floats, latency: LatencyModel) -> float:
    """Tokens per second of one request whose drafts have these lengths.

    Args:
        lengths: ``[chains]``.
        acceptance: ``[chains, length]`` acceptance of each token given the tokens before it.
        latency: latency model.
    """
    prefix_acceptance_prob = np.cumprod(acceptance, axis=1)
    drafted = np.arange(acceptance.shape[1]) < lengths[:, None]
    tokens = 1.0 + float((prefix_acceptance_prob * drafted).sum(axis=1).mean())
    by_length = np.bincount(lengths, minlength=1) / len(lengths)
    seconds = sum(
        share * (latency.target_seconds(1.0 + n, _CONTEXT) + latency.drafting_seconds([1] * n))
        for n, share in enumerate(by_length)
        if share
    )
    return float(tokens / seconds)


def figures_of(records: Records, latency: LatencyModel) -> dict[str, Any]:
    """All results for recorded drafts.

    Raises:
        InvalidParameterError: fewer than two drafts are long enough.
    """
    entropy, acceptance = chains_of(records, _MAX_LENGTH)
    if len(entropy) < 2:
        raise too_few_tokens(f"two drafts of {_MAX_LENGTH} tokens")
    half = len(entropy) // 2
    alone = goodput(np.zeros(len(entropy), dtype=np.int64), acceptance, latency)
    curves: dict[str, list[float]] = {}
    fixed: dict[str, list[float]] = {}
    for name, part in (("chosen on", slice(half)), ("held out", slice(half, None))):
        h, a = entropy[part], acceptance[part]
        curves[name] = [goodput(svip_lengths(h, t), a, latency) / alone for t in THRESHOLDS]
        fixed[name] = [
            goodput(np.full(len(h), n), a, latency) / alone for n in range(_MAX_LENGTH + 1)
        ]
    at = int(np.argmax(curves["chosen on"]))
    length = int(np.argmax(fixed["chosen on"]))
    held = curves["held out"]
    mean_pass = latency.drafting_seconds([1] * _MAX_LENGTH) / _MAX_LENGTH
    near = [v for t, v in zip(THRESHOLDS, held, strict=True) if abs(t - THRESHOLDS[at]) <= 0.25]
    return {
        "num_drafts": len(entropy),
        "longest": _MAX_LENGTH,
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
        "draft_cost": mean_pass / latency.target_seconds(1, _CONTEXT),
    }


class Threshold(Study):
    """Speed by SVIP's threshold, on the samples that choose it and on held-out samples."""

    name = "threshold"
    title = "Choice of SVIP's threshold"
    source = SVIP
    timed = True

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Compute the speed from recorded drafts and timed passes."""
        records = bench.collection(num_speculative_tokens=_MAX_LENGTH).records
        return figures_of(records, bench.latency)

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw both halves for SVIP and for fixed lengths."""
        figure, (svip, fixed) = panels(2, sharey=True)
        for number, (name, values) in enumerate(data["svip"].items()):
            own = look(number) | {"markevery": 5}
            svip.plot(data["thresholds"], values, label=f"half: {name}", **own)
        svip.axvline(data["chosen"], color="#777777", linewidth=1, linestyle=":")
        svip.set_xlabel("threshold h, √nats (dotted: the chosen one)")
        svip.set_ylabel("speed, × target only (one request)")
        svip.set_title("SVIP")
        svip.legend(frameon=False)
        for number, (name, values) in enumerate(data["fixed"].items()):
            fixed.plot(range(len(values)), values, label=name, **look(number))
        fixed.axhline(data["held_out_speedup"], color=COLOURS[2], linewidth=1)
        fixed.set_xlabel("draft length, tokens (line: SVIP, held out)")
        fixed.set_title("fixed length")
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the chosen threshold and its speed on the held-out half."""
        h, there = data["chosen"], data["held_out_speedup"]
        best, fixed = data["best_held_out_speedup"], data["held_out_speedup_fixed"]
        default = data["svip"]["held out"][data["thresholds"].index(THEIR_THRESHOLD)]
        text = (
            f"On one half of {data['num_drafts']} drafts, the best threshold is h = {h:g} (drafts "
            f"of {data['mean_length']:.1f} tokens on average). On the other half it reaches "
            f"{there:.2f} times the speed of target-only decoding. There, the best threshold in "
            f"hindsight, {data['best_in_hindsight']:g}, reaches {best:.2f}, h = {THEIR_THRESHOLD} "
            f"reaches {default:.2f}, and the fixed length {data['chosen_length']}, chosen in the "
            f"same way, reaches {fixed:.2f}. A draft pass takes {data['draft_cost']:.2f} of the "
            "time of a target pass."
        )
        return Description(
            text,
            [
                Finding.of(
                    "A threshold chosen on few held-out samples works on other samples.",
                    f"{there:.2f}, where {best:.2f} is possible",
                    there > 0.98 * best,
                ),
                Finding.of(
                    "The speed is insensitive to the threshold around the best value.",
                    f"the lowest speed within 0.25 of it is {data['lowest_near']:.2f}",
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
