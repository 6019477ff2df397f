"""What records show at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from draftwise.estimators.calibration import RunningCalibration
from draftwise.estimators.information import Gain, information_gains, pearson
from draftwise.estimators.records import Records
from draftwise.estimators.tables import BINNINGS, AcceptanceTable


@dataclass(frozen=True)
class ProfileSummary:
    """Statistics of the records that a profile was fitted to.

    In means a token counts as far as its chain was likely to reach it.

    Attributes:
        num_tokens: drafted tokens.
        num_chains: drafts.
        mean_acceptance: mean acceptance probability.
        acceptance_by_position: the same at each position of the draft, from the first.
        correlation: Pearson's, of A and the acceptance probability.
        gains: information gain of each signal about whether a token was kept.
        fate_gains: the same about its acceptance probability (in ten bins).
        calibration_errors: expected calibration error of each binning on the half of the records
            it was not fitted to.
    """

    num_tokens: int
    num_chains: int
    mean_acceptance: float
    acceptance_by_position: tuple[float, ...]
    correlation: float
    gains: Mapping[str, Gain]
    fate_gains: Mapping[str, Gain]
    calibration_errors: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for a file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ProfileSummary:
        """The inverse of :meth:`to_dict`."""
        known = dict(values)
        known["acceptance_by_position"] = tuple(known["acceptance_by_position"])
        for name in ("gains", "fate_gains"):
            known[name] = {signal: Gain(**gain) for signal, gain in known[name].items()}
        return cls(**known)


def summarise(records: Records, has_companion: bool) -> ProfileSummary:
    """Statistics of records, at least one.

    Args:
        records: of plain speculative decoding.
        has_companion: whether S and A mean anything; without, no tables are judged.
    """
    weight = records.reached()
    by_position = []
    for position in range(int(records.position.max()) + 1):
        here = (records.position == position) & (weight > 0)
        by_position.append(
            float(np.average(records.acceptance[here], weights=weight[here])) if here.any() else 0.0
        )
    return ProfileSummary(
        num_tokens=len(records),
        num_chains=int((records.position == 0).sum()),
        mean_acceptance=float(np.average(records.acceptance, weights=weight)),
        acceptance_by_position=tuple(by_position),
        correlation=pearson(records.agreement, records.acceptance, weight),
        gains=information_gains(records, "accepted", has_companion),
        fate_gains=information_gains(records, "acceptance", has_companion),
        calibration_errors={
            binning: held_out_calibration(records, binning)
            for binning in (BINNINGS if has_companion else ())
        },
    )


def held_out_calibration(records: Records, binning: str) -> float:
    """Expected calibration error of a table on records it has not seen.

    It is fitted to the earlier half of the chains, and then to the later, and judged on the other.
    """
    earlier = records.chain < np.median(records.chain)
    calibration = RunningCalibration()
    for fitted, judged in ((earlier, ~earlier), (~earlier, earlier)):
        if fitted.any() and judged.any():
            table = AcceptanceTable.fit(records.take(fitted), binning)
            others = records.take(judged)
            overlap, agreement = map(torch.from_numpy, (others.overlap, others.agreement))
            predicted = table.predict(overlap, agreement).numpy()
            calibration.observe(predicted, others.acceptance, others.reached())
    return calibration.error
