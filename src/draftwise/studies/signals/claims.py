"""The claims about companions and signals, compared with the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from draftwise.studies.signals import kinds
from draftwise.studies.study import Data, Finding

# Smallest batch size that counts as large.
_LARGE = 8
_THIRD = (0.25, 0.45)
# Standard errors by which an estimate must exceed 0.
_SURE = 2.0


class Judged(NamedTuple):
    """What one companion tells at one sampling setting.

    Attributes:
        sampling: name of the setting.
        own: the measurements that need no companion.
        name: the companion.
        told: the measurements with it.
    """

    sampling: str
    own: Mapping[str, Any]
    name: str
    told: Mapping[str, Any]

    def bits(self, kind: str) -> float:
        """Information of a kind of signal of the companion, in bits."""
        return float(self.told["signals"][kind]["bits"]["mean"])

    @property
    def own_bits(self) -> float:
        """Information of the draft's own signals, in bits."""
        return float(self.own["signals"][kinds.OWN]["bits"]["mean"])


def judged(data: Data) -> list[Judged]:
    """All companions at all sampling settings."""
    return [
        Judged(sampling, own["knowledge"], name, told)
        for sampling, own in data["samplings"].items()
        for name, told in own["knowledge"]["companions"].items()
    ]


def cells(data: Data) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Sampling setting, batch size and goodput of every cell."""
    for sampling, own in data["samplings"].items():
        for size, found in own["batches"].items():
            yield sampling, int(size), found


def findings(data: Data) -> list[Finding]:
    """The claims that these measurements can answer."""
    every = judged(data)
    found = [*_of_information(every), *_of_correlation(every)] if every else []
    found += _of_the_draft(data)
    return [*found, *_of_goodput(data, bool(every))]


def _of_information(every: list[Judged]) -> Iterator[Finding]:
    scores = kinds.SCORES.name
    sure = [
        e.bits(scores) > _SURE * float(e.told["signals"][scores]["bits"]["error"]) for e in every
    ]
    bits = [e.bits(scores) for e in every]
    yield Finding.of(
        "S and A have information about acceptance in every combination of models.",
        f"{min(bits):.3f} to {max(bits):.3f} bits, above 0 by two standard errors in {sum(sure)} "
        f"of {len(sure)}",
        sure,
    )
    shares = [e.bits(scores) / e.own["entropy"] for e in every]
    yield Finding.of(
        "S and A remove about a third of the entropy (34 % on average).",
        f"{np.mean(shares):.0%} on average, {min(shares):.0%} to {max(shares):.0%}",
        bool(_THIRD[0] < np.mean(shares) < _THIRD[1]),
    )
    finer = [e.told["binned"]["S,A adaptive"] >= e.told["binned"]["S,A 20x20"] for e in every]
    yield Finding.of(
        "Adaptive bins have a larger gain than equal bins.",
        f"corrected for chance, at least that of 20×20 in {sum(finer)} of {len(finer)}",
        finer,
    )
    less = [e.own_bits < e.bits(scores) for e in every]
    yield Finding.of(
        "The draft's own signals have less information than S and A.",
        f"in {sum(less)} of {len(less)}; own {min(e.own_bits for e in every):.3f} to "
        f"{max(e.own_bits for e in every):.3f} bits",
        less,
    )
    beyond = [e.told["beyond_own"] for e in every]
    more = [each["mean"] > _SURE * each["error"] for each in beyond]
    means = [each["mean"] for each in beyond]
    yield Finding.of(
        "S and A add information to the draft's own signals (ours).",
        f"{min(means):.3f} to {max(means):.3f} bits more, above 0 by two standard errors in "
        f"{sum(more)} of {len(more)}",
        more,
    )


def _of_correlation(every: list[Judged]) -> Iterator[Finding]:
    known = [e for e in every if e.told["overlap_correlation"] is not None]
    if not known:
        return
    values = {e.name: float(e.told["overlap_correlation"]) for e in known}
    said = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
    yield Finding.of(
        "Draft and companion agree where draft and target do.",
        f"Pearson's correlation of the overlaps: {said}",
        [value > 0.5 for value in values.values()],
    )


def _of_the_draft(data: Data) -> Iterator[Finding]:
    known = [own["knowledge"]["signals"] for own in data["samplings"].values()]
    head, largest = kinds.CONFIDENCE.name, kinds.LARGEST.name
    if all(head in signals for signals in known):
        pairs = [(s[head]["bits"]["mean"], s[largest]["bits"]["mean"]) for s in known]
        yield Finding.of(
            "A trained confidence head has more information than the largest q (ours).",
            ", ".join(f"{a:.3f} against {b:.3f} bits" for a, b in pairs),
            [a > b for a, b in pairs],
        )


def _of_goodput(data: Data, has_companion: bool) -> Iterator[Finding]:
    every = list(cells(data))
    last = max(size for _, size, _ in every)
    if has_companion:
        yield from _of_companions(every)
    fixed = [cell["fixed"]["goodput"]["mean"] for _, size, cell in every if size == last]
    yield Finding.of(
        "At the largest batch, fixed-length speculation is slower than the target.",
        f"{_span(fixed)} times no speculation at batch {last}",
        [value < 1 for value in fixed],
    )


def _of_companions(every: list[tuple[str, int, Mapping[str, Any]]]) -> Iterator[Finding]:
    def ratios(against: str) -> list[float]:
        """Of each companion in each cell."""
        return [
            own["best"][against]["mean"]
            for _, _, cell in every
            for own in cell["companions"].values()
        ]

    of_fixed = [
        own["best"]["goodput"]["mean"] / cell["fixed"]["goodput"]["mean"]
        for _, size, cell in every
        for own in cell["companions"].values()
        if size >= _LARGE
    ]
    if of_fixed:
        yield Finding.of(
            "At large batches, deciding by S and A is 1.4 times as fast as a fixed length of 5.",
            f"{_mean(of_fixed):.2f} on average, {_span(of_fixed)}",
            [value >= 1.4 for value in of_fixed],
        )
    own = ratios("over_own")
    yield Finding.of(
        "The companion earns its pass: it is faster than what needs no companion (ours).",
        f"{_span(own)} times the best of these, above 1 in {sum(v > 1 for v in own)} of {len(own)}",
        [value > 1 for value in own],
    )
    none = ratios("goodput")
    yield Finding.of(
        "It is faster than no speculation at every batch size.",
        f"{_span(none)} times no speculation",
        [value > 1 for value in none],
    )
    if all(len(cell["companions"]) > 1 for _, _, cell in every):
        spreads, gains = [], []
        for _, _, cell in every:
            each = [own["best"]["over_own"]["mean"] for own in cell["companions"].values()]
            spreads.append(max(each) - min(each))
            gains.append(max(each) - 1)
        yield Finding.of(
            "The choice of companion matters less than having one.",
            f"goodput differs by {max(spreads):.2f} between companions, and the best one gains at "
            f"most {max(gains):.2f} over the draft's own signals",
            [gain > spread for gain, spread in zip(gains, spreads, strict=True)],
        )


def _mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"
