"""Entropy and acceptance of individual tokens.

Recomputes SVIP's table of representative tokens (Zhang et al. 2024, appendix): the draft's entropy
and the acceptance of individual tokens. The source found that tokens which continue a word or a set
phrase have low entropy and are accepted, while tokens which begin something new have high entropy
and are often rejected.

The results are exact expectations. At each position, a token x is drafted with probability q(x) and
drafted and accepted with probability min(p, q)(x). These are summed over all positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from draftwise.benchmark.style import COLOURS
from draftwise.core.signals import entropy
from draftwise.studies.bounds import rank_correlation
from draftwise.studies.drawing import panels, styled
from draftwise.studies.positions import Floats, Passage
from draftwise.studies.study import SVIP, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Minimum expected number of drafts of a token, and number of tokens shown of each kind.
_MIN_DRAFTS = 8.0
_NUM_SHOWN = 10
_NUM_POINTS = 250


def token_sums(passages: Iterable[Passage]) -> tuple[Floats, Floats, Floats]:
    """Expected counts of each token over all positions: drafted, accepted, and its entropy.

    Returns:
        ``[vocab]`` Σ q(x), Σ min(p, q)(x), Σ q(x)·H(q).
    """
    sums: list[torch.Tensor] = []
    for passage in passages:
        q, p = passage.q.double(), passage.p.double()
        if passage.greedy:
            agrees = (q.argmax(dim=1) == p.argmax(dim=1)).double().unsqueeze(1)
            both = q * agrees
        else:
            both = torch.minimum(p, q)
        part = [q.sum(dim=0), both.sum(dim=0), (q * entropy(q).unsqueeze(1)).sum(dim=0)]
        sums = [a + b for a, b in zip(sums, part, strict=True)] if sums else part
    drafted, accepted, weighted = (each.numpy() for each in sums)
    return drafted, accepted, weighted


def figures_of(passages: Iterable[Passage], texts: dict[int, str]) -> dict[str, Any]:
    """All results.

    Args:
        passages: positions of whole texts.
        texts: text of each token id. Tokens without text are shown by id.
    """
    drafted, accepted, weighted = token_sums(passages)
    often = np.flatnonzero(drafted >= min(_MIN_DRAFTS, float(drafted.max())))
    rows: list[dict[str, Any]] = [
        {
            "token": int(token),
            "text": texts.get(int(token), str(int(token))),
            "drafted": float(drafted[token]),
            "acceptance": float(accepted[token] / drafted[token]),
            "entropy": float(weighted[token] / drafted[token]),
        }
        for token in often
    ]
    rows.sort(key=lambda row: -row["drafted"])
    by_acceptance = sorted(rows, key=lambda row: row["acceptance"])
    entropies = np.array([row["entropy"] for row in rows])
    acceptances = np.array([row["acceptance"] for row in rows])
    begins = np.array([not row["text"][:1].isalnum() for row in rows])
    return {
        "num_tokens": len(rows),
        "acceptance": float(accepted.sum() / drafted.sum()),
        "correlation": rank_correlation(-entropies, acceptances) if len(rows) > 2 else 0.0,
        "points": rows[:_NUM_POINTS],
        "most_accepted": by_acceptance[::-1][:_NUM_SHOWN],
        "least_accepted": by_acceptance[:_NUM_SHOWN],
        "within_words": _means(rows, ~begins),
        "begins": _means(rows, begins),
    }


def _means(rows: list[dict[str, Any]], chosen: Any) -> dict[str, float] | None:
    part = [row for row, is_one in zip(rows, chosen, strict=True) if is_one]
    if not part:
        return None
    weight = [row["drafted"] for row in part]
    return {
        key: float(np.average([row[key] for row in part], weights=weight))
        for key in ("entropy", "acceptance")
    }


class TokenTable(Study):
    """Entropy and acceptance of representative tokens."""

    name = "token-table"
    title = "Entropy and acceptance of individual tokens"
    source = SVIP

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Sum over all positions of the target's texts."""
        tokenizer = bench.quick().target.tokenizer
        known: dict[int, str] = {}
        if tokenizer is not None:
            known = {i: str(tokenizer.decode([i])) for i in range(len(tokenizer))}
        return figures_of(bench.passages(), known)

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw all frequent tokens, and the table."""
        figure, (cloud, table) = panels(2, width=4.6, height=3.6)
        points = data["points"]
        size = [4 + 2 * np.sqrt(point["drafted"]) for point in points]
        at = [point["entropy"] for point in points], [point["acceptance"] for point in points]
        cloud.scatter(*at, s=size, color=COLOURS[0], alpha=0.5, linewidths=0)
        cloud.set_xlabel("mean H(q) where the token is drafted, nats")
        cloud.set_ylabel("fraction accepted")
        cloud.set_ylim(0, 1.02)
        cloud.set_title("area: number of times drafted")
        table.axis("off")
        head = ("token", "accepted", "H(q)")
        for x, key in ((0.0, "most_accepted"), (0.53, "least_accepted")):
            rows = [
                (_shown(row["text"]), f"{row['acceptance']:.2f}", f"{row['entropy']:.2f}")
                for row in data[key]
            ]
            title = key.replace("_", " ")
            table.text(x, 1.02, title, fontweight="bold", transform=table.transAxes)
            for line, cells in enumerate([head, *rows]):
                for place, cell in zip((x, x + 0.22, x + 0.37), cells, strict=True):
                    table.text(
                        place,
                        0.94 - 0.085 * line,
                        cell,
                        transform=table.transAxes,
                        family="monospace",
                        fontsize=7,
                        parse_math=False,
                    )
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the most and the least accepted tokens."""
        best = ", ".join(_shown(row["text"]) for row in data["most_accepted"][:5])
        worst = ", ".join(_shown(row["text"]) for row in data["least_accepted"][:5])
        text = (
            f"Of {data['num_tokens']} frequently drafted tokens, the most accepted are {best}, and "
            f"the least accepted are {worst} (· is a space, ↵ a line break). The rank correlation "
            "between a token's acceptance and the mean entropy where it is drafted is "
            f"{-data['correlation']:.2f}."
        )
        findings = [
            Finding.of(
                "Tokens from distributions of low entropy are accepted more often than tokens from "
                "distributions of high entropy.",
                f"rank correlation {-data['correlation']:.2f} over tokens",
                data["correlation"] > 0.3,
            )
        ]
        inside, begins = data["within_words"], data["begins"]
        if inside is not None and begins is not None:
            findings.append(
                Finding.of(
                    "Tokens that continue a word have lower entropy and higher acceptance than "
                    "tokens that begin one.",
                    f"acceptance {inside['acceptance']:.2f} against {begins['acceptance']:.2f}, "
                    f"entropy {inside['entropy']:.2f} against {begins['entropy']:.2f} nats",
                    [
                        inside["acceptance"] > begins["acceptance"],
                        inside["entropy"] < begins["entropy"],
                    ],
                )
            )
        return Description(text, findings)


def _shown(text: str) -> str:
    """A token with visible spaces and line breaks."""
    return "".join(c if c.isprintable() else "?" for c in text.replace(" ", "·").replace("\n", "↵"))
