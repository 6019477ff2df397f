"""Lower bounds on acceptance, with and without knowledge of the target's distribution.

Recomputes SVIP's derivation on real distributions (Zhang et al. 2024, section 3 and appendix). The
acceptance β = Σ min(p, q) is compared with Pinsker's bound 1 − √(KL(q ‖ p)/2), with the bound of
Bretagnolle and Huber, and with the approximation 1 − √(c·H(q)). The approximation assumes that the
cross entropy is proportional to H(q), so it does not need the target. The study also fits the ratio
H(q, p)/H(q), and estimates the probability that the approximation is a lower bound as a function of
c. The source found that the bounds are correlated with the acceptance, that the ratio is
concentrated near a constant (skewed, as a shifted Gamma distribution is), and that the
approximation holds with high probability for sufficiently large c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import stats

from draftwise.benchmark.style import COLOURS
from draftwise.core.signals import bretagnolle_huber_bound, pinsker_bound
from draftwise.studies.drawing import panels, styled
from draftwise.studies.positions import Floats, Positions
from draftwise.studies.study import SVIP, Data, Description, Finding, Study
from draftwise.studies.workbench import Workbench

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FACTORS = tuple(np.round(np.linspace(0.0, 2.0, 41), 3).tolist())
# SVIP's authors use the criterion √(0.15·H) > 0.3.
THEIR_FACTOR = 0.15
# The ratio is not computed for entropies below this, in nats.
_MIN_ENTROPY = 0.05
_NUM_POINTS = 350
_MAX_RATIO = 6.0


def ratio_fits(ratio: Floats) -> dict[str, Any]:
    """Maximum-likelihood fits of a Gaussian and of a Gamma distribution shifted by 1.

    Args:
        ratio: ``[n]`` H(q, p)/H(q), above 1.

    Returns:
        Parameters, and the Kolmogorov distance of each fit to the data.
    """
    mean, deviation = stats.norm.fit(ratio)
    shape, _, scale = stats.gamma.fit(ratio, floc=1.0)
    return {
        "gaussian": {
            "mean": float(mean),
            "standard_deviation": float(deviation),
            "distance": _distance(ratio, "norm", (mean, deviation)),
        },
        "gamma": {
            "shift": 1.0,
            "shape": float(shape),
            "scale": float(scale),
            "distance": _distance(ratio, "gamma", (shape, 1.0, scale)),
        },
    }


def _distance(values: Floats, family: str, parameters: tuple[float, ...]) -> float:
    """Kolmogorov distance. The asymptotic method skips an exact p-value, which is slow."""
    return float(stats.ks_1samp(values, getattr(stats, family).cdf, parameters, method="asymp")[0])


def figures_of(positions: Positions, seed: int = 0) -> dict[str, Any]:
    """All results for a set of positions."""
    divergence = torch.from_numpy(positions.divergence)
    bounds = {
        "Pinsker": pinsker_bound(divergence).numpy(),
        "Bretagnolle–Huber": bretagnolle_huber_bound(divergence).numpy(),
    }
    beta, h = positions.acceptance, positions.entropy
    sure = (h > _MIN_ENTROPY) & np.isfinite(positions.divergence)
    ratio = positions.cross_entropy[sure] / h[sure]
    ratio = ratio[ratio > 1.0 + 1e-6]
    holds = [float((1 - np.sqrt(c * h) <= beta + 1e-9).mean()) for c in FACTORS]
    gaps = [float(np.abs(beta - (1 - np.sqrt(c * h)).clip(0.0)).mean()) for c in FACTORS]
    random = np.random.default_rng(seed)
    shown = random.permutation(len(positions))[:_NUM_POINTS]
    figures: dict[str, Any] = {
        "num_positions": len(positions),
        "acceptance": float(beta.mean()),
        "bounds": {
            name: {
                "mean": float(bound.mean()),
                "holds": float((bound <= beta + 1e-5).mean()),
                "vacuous": float((bound <= 0).mean()),
                "correlation": rank_correlation(bound, beta),
            }
            for name, bound in bounds.items()
        },
        "entropyrank_correlation": rank_correlation(-np.sqrt(h), beta),
        "factors": list(FACTORS),
        "holds": holds,
        "gap": gaps,
        "best_factor": FACTORS[int(np.argmin(gaps))],
        "ratio": {
            "num_positions": len(ratio),
            "left_out": float(1 - sure.mean()),
            "mean": float(ratio.mean()) if len(ratio) else None,
            "quartiles": np.quantile(ratio, [0.25, 0.5, 0.75]).tolist() if len(ratio) else None,
            "skewness": float(stats.skew(ratio)) if len(ratio) > 2 else None,
        },
        "points": {
            "divergence": np.where(
                np.isfinite(positions.divergence[shown]), positions.divergence[shown], 1e3
            ).tolist(),
            "entropy": h[shown].tolist(),
            "acceptance": beta[shown].tolist(),
        },
    }
    if len(ratio) > 10:
        figures["ratio"] |= ratio_fits(ratio)
        inside = ratio[ratio < _MAX_RATIO]
        density, edges = np.histogram(inside, 40, (1.0, _MAX_RATIO))
        width = edges[1] - edges[0]
        figures["ratio"] |= {
            "density": (density / len(ratio) / width).tolist(),
            "edges": edges.tolist(),
        }
    return figures


def rank_correlation(x: Floats, y: Floats) -> float:
    """Spearman's rank correlation of two columns ``[n]``; 0 if one is constant."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(stats.spearmanr(x, y).statistic)


class Bounds(Study):
    """Acceptance, its bounds, and the approximate bound from the draft's entropy alone."""

    name = "bounds"
    title = "Bounds on acceptance"
    source = SVIP

    def measure(self, bench: Workbench) -> dict[str, Any]:
        """Evaluate the bounds at all positions of the target's texts."""
        return figures_of(bench.positions(), bench.settings.seed)

    @styled
    def draw(self, data: Data) -> Figure:
        """Draw the bounds, the approximation, the ratio, and the probability of a valid bound."""
        figure, (exact, free, ratio, holding) = panels(2, 2, width=4.4, height=3.1)
        points = data["points"]
        look: dict[str, Any] = {"s": 6, "color": "#777777", "alpha": 0.5, "linewidths": 0}
        top = max(float(np.quantile(points["divergence"], 0.97)), 0.1)
        kl = np.linspace(0.0, top, 200)
        exact.scatter(points["divergence"], points["acceptance"], label="positions", **look)
        exact.plot(kl, pinsker_bound(torch.from_numpy(kl)), color=COLOURS[0], label="Pinsker")
        exact.plot(
            kl,
            bretagnolle_huber_bound(torch.from_numpy(kl)),
            "--",
            color=COLOURS[1],
            label="Bretagnolle–Huber",
        )
        exact.set_xlim(0, top)
        exact.set_xlabel("KL(q ‖ p), nats")
        exact.set_ylabel("acceptance β = Σ min(p, q)")
        exact.legend(frameon=False, loc="upper right")
        h = np.linspace(0.0, max(points["entropy"]) or 1.0, 200)
        free.scatter(points["entropy"], points["acceptance"], **look)
        for number, (factor, style) in enumerate(
            ((THEIR_FACTOR, "-"), (data["best_factor"], "--"))
        ):
            curve = (1 - np.sqrt(factor * h)).clip(0.0)
            free.plot(h, curve, style, color=COLOURS[number], label=f"1 − √({factor:g}·H)")
        free.set_xlabel("H(q), nats")
        free.set_ylabel("acceptance β")
        free.legend(frameon=False, loc="upper right")
        fits = data["ratio"]
        if "edges" in fits:
            ratio.stairs(fits["density"], fits["edges"], fill=True, color="#bbbbbb", label="data")
            at = np.linspace(1.001, _MAX_RATIO, 300)
            gaussian, gamma = fits["gaussian"], fits["gamma"]
            normal = stats.norm.pdf(at, gaussian["mean"], gaussian["standard_deviation"])
            ratio.plot(at, normal, color=COLOURS[0], label="Gaussian")
            shifted = stats.gamma.pdf(at, gamma["shape"], 1.0, gamma["scale"])
            ratio.plot(at, shifted, "--", color=COLOURS[1], label="Gamma, shifted by 1")
            ratio.set_ylim(0, 1.3 * max(fits["density"]))
        ratio.set_xlabel("H(q, p) / H(q)")
        ratio.set_ylabel("density")
        ratio.legend(frameon=False)
        holding.plot(data["factors"], data["holds"], color=COLOURS[0], label="is a lower bound")
        holding.plot(data["factors"], data["gap"], "--", color=COLOURS[1], label="mean distance")
        holding.axvline(THEIR_FACTOR, color="#777777", linewidth=1, linestyle=":")
        holding.set_xlabel("c in 1 − √(c·H(q)); dotted: the authors' 0.15")
        holding.set_ylabel("probability; distance to β")
        holding.set_ylim(0, 1)
        holding.legend(frameon=False)
        return figure

    def describe(self, data: Data) -> Description:
        """Describe the quality of each bound."""
        pinsker, huber = data["bounds"]["Pinsker"], data["bounds"]["Bretagnolle–Huber"]
        at = data["factors"].index(THEIR_FACTOR)
        half = data["factors"].index(0.5)
        ratio = data["ratio"]
        text = (
            f"The mean acceptance is {data['acceptance']:.3f}. The mean of Pinsker's bound is "
            f"{pinsker['mean']:.3f} (it is 0 at {pinsker['vacuous']:.0%} of the positions), and "
            f"that of Bretagnolle and Huber's bound is {huber['mean']:.3f}. Without the target, "
            f"1 − √(0.15·H) is below the acceptance at {data['holds'][at]:.0%} of the positions "
            f"and 1 − √(0.5·H) at {data['holds'][half]:.0%}. The mean distance to the acceptance "
            f"is smallest at c = {data['best_factor']:g}. "
        )
        findings = [
            Finding.of(
                "Both bounds are below the acceptance and correlated with it.",
                f"they hold at {pinsker['holds']:.1%} and {huber['holds']:.1%} of the positions; "
                f"rank correlation {pinsker['correlation']:.2f}",
                [min(pinsker["holds"], huber["holds"]) > 0.999, pinsker["correlation"] > 0.7],
            ),
            Finding.of(
                "The draft's entropy alone orders positions by acceptance.",
                f"rank correlation of −√H(q) and β {data['entropyrank_correlation']:.2f}",
                data["entropyrank_correlation"] > 0.5,
            ),
            Finding.of(
                "The approximation 1 − √(c·H) is a bound with high probability for large c.",
                f"{data['holds'][at]:.0%} at c = 0.15, {data['holds'][half]:.0%} at 0.5, "
                f"{data['holds'][-1]:.0%} at {data['factors'][-1]:g}",
                data["holds"][-1] > 0.9,
            ),
        ]
        if "gamma" in ratio:
            low, middle, high = ratio["quartiles"]
            gaussian, gamma = ratio["gaussian"]["distance"], ratio["gamma"]["distance"]
            text += (
                f"The ratio H(q, p)/H(q) has the quartiles {low:.2f}, {middle:.2f} and {high:.2f} "
                f"({ratio['left_out']:.0%} of the positions, with an entropy below "
                f"{_MIN_ENTROPY} nats, are excluded). The Kolmogorov distance of the shifted "
                f"Gamma distribution is {gamma:.2f}, that of the Gaussian {gaussian:.2f}."
            )
            findings += [
                Finding.of(
                    "The ratio of cross entropy to entropy is close to a constant.",
                    f"quartiles {low:.2f}, {middle:.2f}, {high:.2f}; mean {ratio['mean']:.2f}",
                    (high - low) < 0.5 * middle and ratio["mean"] < 1.5 * middle,
                ),
                Finding.of(
                    "The ratio is skewed: a shifted Gamma fits better than a Gaussian.",
                    f"distance {gamma:.2f} against {gaussian:.2f}, skewness "
                    f"{ratio['skewness']:.1f}",
                    gamma < gaussian,
                ),
            ]
        return Description(text, findings)
