"""Oracle draft length along the context.

Recomputes SVIP's analysis of the oracle draft length (Zhang et al. 2024, section 2): the number of
consecutive tokens that the target would have accepted, from every position where a draft begins.
The source found that this length varies strongly between steps, throughout the context, so no fixed
length is optimal.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwise.benchmark.style import COLOURS
from draftwise.studies.drawing import count_on, panels, styled
from draftwise.studies.positions import Booleans, Integers, Positions
from draftwise.studies.study import SVIP, Data, Description, Finding, Study, too_few_tokens
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUM_BINS = 6
_MAX_SHOWN = 16


def oracle_lengths(text: Integers, accepted: Booleans) -> tuple[Integers, Integers]:
    """Start and accepted length of each draft, for drafts of unlimited length.

    The draft after a rejected token begins behind that token. Drafts that the end of a text cuts
    off are left out.

    Args:
        text: ``[n]`` index of each position's text, ascending.
        accepted: ``[n]`` whether the token at the position was drafted and accepted.

    Returns:
        ``[drafts]`` index of the first position, and ``[drafts]`` length in tokens.
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
    """All results for a set of positions.

    Raises:
        InvalidParameterError: no token was rejected, or none accepted.
    """
    starts, lengths = oracle_lengths(positions.text, positions.accepted)
    if not lengths.any():
        raise too_few_tokens("accepted and rejected tokens")
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
        # Variance if all tokens were accepted independently with the same probability.
        "variance_by_chance": alpha / (1 - alpha) ** 2,
        "shares": (np.bincount(lengths.clip(max=_MAX_SHOWN)) / len(lengths)).tolist(),
        "by_context": by_context,
        "one_text": {"at": index[first].tolist(), "length": lengths[first].tolist()},
    }


class OracleLength(Study):
    """Variance of the oracle draft length along the context."""

    name = "oracle-length"
    title = "Oracle draft length"
    source = SVIP

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Compute oracle lengths over the target's texts."""
        return figures_of(bench.positions(max_tokens=bench.settings.long_text))

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw one text, the distribution of lengths, and their spread along the context."""
        figure, (one, shares, spread) = panels(3, width=3.6)
        text = data["one_text"]
        one.step(text["at"], text["length"], where="post", color=COLOURS[0], linewidth=1)
        one.set_xlabel("tokens generated before")
        one.set_ylabel("oracle draft length, tokens")
        one.set_title("drafts of one text")
        alpha, seen = data["acceptance"], data["shares"]
        at = np.arange(len(seen))
        shares.bar(at, seen, color=COLOURS[0], label="measured")
        by_chance = (1 - alpha) * alpha**at
        shares.plot(at, by_chance, "D--", color=COLOURS[1], markersize=3, label="independent")
        shares.set_xlabel(f"oracle draft length, tokens ({_MAX_SHOWN}: or more)")
        shares.set_ylabel("share of drafts")
        count_on(shares.xaxis)
        shares.legend(frameon=False)
        bins = data["by_context"]
        middle = [(each["from"] + each["to"]) / 2 for each in bins]
        means = [each["mean"] for each in bins]
        # Lengths are non-negative.
        above = [each["standard_deviation"] for each in bins]
        below = [min(m, e) for m, e in zip(means, above, strict=True)]
        spread.errorbar(middle, means, (below, above), fmt="o", color=COLOURS[0], capsize=3)
        spread.set_ylim(bottom=0)
        spread.set_xlabel("tokens generated before")
        spread.set_ylabel("mean and standard deviation, tokens")
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the variance of the lengths, and compare it with independent acceptance."""
        deviation = data["variance"] ** 0.5
        ratio = data["variance"] / data["variance_by_chance"]
        text = (
            f"The oracle draft length is {data['mean']:.1f} tokens on average, with a standard "
            f"deviation of {deviation:.1f} ({data['num_drafts']} drafts; {data['acceptance']:.0%} "
            "of the positions are accepted). If all positions were accepted independently with "
            f"the same probability, the variance would be {data['variance_by_chance']:.1f}. The "
            f"measured variance is {data['variance']:.1f}, {ratio:.1f} times as much. Only the "
            "excess over this random variance is predictable by a policy."
        )
        bins = data["by_context"]
        ours = f"standard deviation {deviation:.1f} at a mean of {data['mean']:.1f} tokens"
        everywhere = [b["standard_deviation"] > 0.5 * b["mean"] for b in bins]
        spreads = ", ".join(f"{b['standard_deviation']:.1f}" for b in bins)
        return Description(
            text,
            [
                Finding.of(
                    "The oracle draft length varies strongly from step to step.",
                    ours,
                    deviation > 0.5 * data["mean"],
                ),
                Finding.of(
                    "The length varies throughout the context, so no fixed length is optimal.",
                    f"standard deviations of {spreads} tokens in {len(bins)} parts of the context",
                    everywhere,
                ),
                Finding.of(
                    "The premise of a fixed length, uniform acceptance, does not hold.",
                    f"variance {ratio:.1f} times that of independent, equal acceptance",
                    ratio > 1.1,
                ),
            ],
        )
