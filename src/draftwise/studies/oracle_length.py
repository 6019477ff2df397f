"""How long each draft should have been, over the context.

Recomputes SVIP's analysis of the oracle draft length (Zhang et al. 2024, section 2): how many
tokens in a row the target would have accepted, from every place where a draft begins. The source
found that this length varies a great deal from one step to the next, all along the context, so that
no fixed length fits.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from draftwise.benchmark.style import COLOURS
from draftwise.studies.drawing import panels, styled
from draftwise.studies.positions import Booleans, Integers, Positions
from draftwise.studies.study import SVIP, Account, Data, Finding, Study
from draftwise.studies.workbench import Workbench

_NUM_BINS = 6
_LONGEST_SHOWN = 16


def oracle_lengths(text: Integers, accepted: Booleans) -> tuple[Integers, Integers]:
    """Where drafts begin and how many of their tokens are accepted, if none ended too early.

    The draft after a rejected token begins behind it. What a text's end cuts off is left out.

    Args:
        text: ``[n]`` number of each position's text, ascending.
        accepted: ``[n]`` whether what stands there was drafted and accepted.

    Returns:
        ``[drafts]`` index of the first position, and length in tokens.
    """
    starts, lengths = [], []
    begin = 0
    for at in range(len(text)):
        if at and text[at] != text[at - 1]:
            begin = at
        if not accepted[at]:
            starts.append(begin)
            lengths.append(at - begin)
            begin = at + 1
    return np.array(starts, dtype=np.int64), np.array(lengths, dtype=np.int64)


def figures_of(positions: Positions) -> dict[str, Any]:
    """All figures of some positions."""
    starts, lengths = oracle_lengths(positions.text, positions.accepted)
    if not len(lengths):
        return {"num_drafts": 0}
    alpha = float(positions.accepted.mean())
    index = positions.index[starts]
    edges = np.unique(np.linspace(0, index.max() + 1, _NUM_BINS + 1).astype(int))
    by_context = []
    for low, high in itertools.pairwise(edges):
        here = lengths[(index >= low) & (index < high)]
        if len(here) > 1:
            by_context.append(
                {
                    "from": int(low),
                    "to": int(high),
                    "num_drafts": len(here),
                    "mean": float(here.mean()),
                    "standard_deviation": float(here.std()),
                    "quartiles": np.quantile(here, [0.25, 0.5, 0.75]).tolist(),
                }
            )
    longest = positions.text[positions.index.argmax()]
    first = positions.text[starts] == longest
    return {
        "num_drafts": len(lengths),
        "acceptance": alpha,
        "mean": float(lengths.mean()),
        "variance": float(lengths.var()),
        # Of lengths whose tokens are accepted independently, with the same probability each.
        "variance_by_chance": alpha / (1 - alpha) ** 2 if alpha < 1 else float("inf"),
        "shares": (np.bincount(lengths.clip(max=_LONGEST_SHOWN)) / len(lengths)).tolist(),
        "by_context": by_context,
        "one_text": {"at": index[first].tolist(), "length": lengths[first].tolist()},
    }


class OracleLength(Study):
    """Variance of the oracle draft length over the context."""

    name = "oracle-length"
    title = "How long each draft should have been"
    source = SVIP

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Over the target's texts."""
        return figures_of(bench.positions(max_tokens=bench.settings.long_text))

    @styled
    def draw(self, data: Data) -> Figure:
        """One text, the distribution, and the spread over the context."""
        figure, (one, shares, spread) = panels(3, width=3.6)
        text = data["one_text"]
        one.step(text["at"], text["length"], where="post", color=COLOURS[0], linewidth=1)
        one.set_xlabel("tokens generated before")
        one.set_ylabel("oracle draft length, tokens")
        one.set_title("one text, draft after draft")
        alpha, seen = data["acceptance"], data["shares"]
        at = np.arange(len(seen))
        shares.bar(at, seen, color=COLOURS[0], label="measured")
        by_chance = (1 - alpha) * alpha**at
        shares.plot(at, by_chance, "D--", color=COLOURS[1], markersize=3, label="independent")
        shares.set_xlabel(f"oracle draft length, tokens ({_LONGEST_SHOWN}: or more)")
        shares.set_ylabel("share of drafts")
        shares.xaxis.set_major_locator(MaxNLocator(integer=True))
        shares.legend(frameon=False)
        bins = data["by_context"]
        middle = [(each["from"] + each["to"]) / 2 for each in bins]
        means = [each["mean"] for each in bins]
        # A length is never below 0.
        above = [each["standard_deviation"] for each in bins]
        below = [min(m, e) for m, e in zip(means, above, strict=True)]
        spread.errorbar(middle, means, (below, above), fmt="o", color=COLOURS[0], capsize=3)
        spread.set_ylim(bottom=0)
        spread.set_xlabel("tokens generated before")
        spread.set_ylabel("mean and standard deviation, tokens")
        return figure

    def tell(self, data: Data) -> Account:
        """Whether lengths vary, and whether more than by chance."""
        deviation = data["variance"] ** 0.5
        ratio = data["variance"] / data["variance_by_chance"]
        text = (
            f"A draft of the right length would have {data['mean']:.1f} tokens on average, with a "
            f"standard deviation of {deviation:.1f} ({data['num_drafts']} drafts; "
            f"{data['acceptance']:.0%} of the positions accepted). If all positions were accepted "
            f"independently with the same probability the variance would be "
            f"{data['variance_by_chance']:.1f}; it is {data['variance']:.1f}, {ratio:.1f} times "
            "that. What exceeds 1 is what a policy could know; the rest is chance."
        )
        bins = data["by_context"]
        ours = f"standard deviation {deviation:.1f} at a mean of {data['mean']:.1f} tokens"
        everywhere = [b["standard_deviation"] > 0.5 * b["mean"] for b in bins]
        spreads = ", ".join(f"{b['standard_deviation']:.1f}" for b in bins)
        return Account(
            text,
            [
                Finding.of(
                    "The oracle draft length varies much from step to step.",
                    ours,
                    deviation > 0.5 * data["mean"],
                ),
                Finding.of(
                    "It does so all along the context, so that no fixed length fits.",
                    f"standard deviations of {spreads} tokens in {len(bins)} parts of the context",
                    everywhere,
                ),
                Finding.of(
                    "The premise of a fixed length, that acceptance is alike everywhere, is wrong.",
                    f"variance {ratio:.1f} times that of independent, equal acceptance",
                    ratio > 1.1,
                ),
            ],
        )
