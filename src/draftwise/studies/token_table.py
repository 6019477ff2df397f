"""Entropy and acceptance of single tokens.

Recomputes SVIP's table of representative tokens (Zhang et al. 2024, appendix): which tokens the
draft is sure of, and which of them the target accepts. The source found that what continues a word
or a set phrase has a low entropy and is accepted, while what begins something new has a high
entropy and is often rejected.

Nothing is drawn: over all positions a token x is drafted with probability q(x) and accepted with
min(p, q)(x), and these are summed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from draftwise.benchmark.style import COLOURS
from draftwise.core.signals import entropy
from draftwise.studies.bounds import rank_correlation
from draftwise.studies.drawing import panels, styled
from draftwise.studies.positions import Floats, Passage
from draftwise.studies.study import SVIP, Account, Data, Finding, Study
from draftwise.studies.workbench import Workbench

# A token counts if it would have been drafted so often, and so many are shown of each kind.
_FEWEST = 8.0
_NUM_SHOWN = 10
_NUM_POINTS = 250


def token_sums(passages: Iterable[Passage]) -> tuple[Floats, Floats, Floats]:
    """Over all positions: how often each token is drafted, accepted, and from what entropy.

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
    """All figures.

    Args:
        passages: whole texts.
        texts: what a token looks like; those missing are shown by number.
    """
    drafted, accepted, weighted = token_sums(passages)
    often = np.flatnonzero(drafted >= min(_FEWEST, float(drafted.max())))
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
    title = "Tokens that are accepted, and tokens that are not"
    source = SVIP

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Over the target's texts."""
        tokenizer = bench.quick().target.tokenizer
        known: dict[int, str] = {}
        if tokenizer is not None:
            known = {i: str(tokenizer.decode([i])) for i in range(len(tokenizer))}
        return figures_of(bench.passages(), known)

    @styled
    def draw(self, data: Data) -> Figure:
        """Every frequent token, and the table."""
        figure, (cloud, table) = panels(2, width=4.6, height=3.6)
        points = data["points"]
        size = [4 + 2 * np.sqrt(point["drafted"]) for point in points]
        at = [point["entropy"] for point in points], [point["acceptance"] for point in points]
        cloud.scatter(*at, s=size, color=COLOURS[0], alpha=0.5, linewidths=0)
        cloud.set_xlabel("mean H(q) where it is drafted, nats")
        cloud.set_ylabel("share accepted")
        cloud.set_ylim(0, 1.02)
        cloud.set_title("area: how often it is drafted")
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

    def tell(self, data: Data) -> Account:
        """Which tokens are which."""
        best = ", ".join(_shown(row["text"]) for row in data["most_accepted"][:5])
        worst = ", ".join(_shown(row["text"]) for row in data["least_accepted"][:5])
        text = (
            f"Of {data['num_tokens']} tokens that are drafted often enough, those accepted most "
            f"are {best}; least, {worst} (· is a blank, ↵ a new line). The rank correlation of a "
            f"token's acceptance with the entropy it comes from is {-data['correlation']:.2f}."
        )
        findings = [
            Finding.of(
                "Tokens from distributions of low entropy are accepted, those of high entropy "
                "are not.",
                f"rank correlation {-data['correlation']:.2f} over tokens",
                data["correlation"] > 0.3,
            )
        ]
        inside, begins = data["within_words"], data["begins"]
        if inside is not None and begins is not None:
            findings.append(
                Finding.of(
                    "What continues a word is surer and more often accepted than what begins one.",
                    f"acceptance {inside['acceptance']:.2f} against {begins['acceptance']:.2f}, "
                    f"entropy {inside['entropy']:.2f} against {begins['entropy']:.2f} nats",
                    [
                        inside["acceptance"] > begins["acceptance"],
                        inside["entropy"] < begins["entropy"],
                    ],
                )
            )
        return Account(text, findings)


def _shown(text: str) -> str:
    """A token with its blanks and line ends visible."""
    return "".join(c if c.isprintable() else "?" for c in text.replace(" ", "·").replace("\n", "↵"))
