"""Summary statistics of records."""

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

    In means, a token is weighted by the probability that all tokens before it are accepted.

    Attributes:
        num_tokens: number of drafted tokens.
        num_chains: number of drafts.
        mean_acceptance: mean acceptance probability.
        acceptance_by_position: mean acceptance probability at each position of the draft.
        correlation: Pearson's correlation of A and the acceptance probability.
        gains: information gain of each signal about whether a token was accepted.
        fate_gains: information gain of each signal about the acceptance probability in ten bins.
        calibration_errors: expected calibration error of each binning, on the half of the records
            that the table was not fitted to.
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
        """Return the summary as JSON-compatible values."""
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
    """Compute the statistics of records.

    Args:
        records: records of plain speculative decoding, at least one token.
        has_companion: whether the records contain S and A. Without a companion, no tables are
            evaluated.
    """
    weight = records.reach_probability()
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
    """Expected calibration error of a table by two-fold cross-validation.

    The table is fitted to the earlier half of the chains and evaluated on the later half, and vice
    versa.
    """
    earlier = records.chain < np.median(records.chain)
    calibration = RunningCalibration()
    for training, held_out in ((earlier, ~earlier), (~earlier, earlier)):
        if training.any() and held_out.any():
            table = AcceptanceTable.fit(records.take(training), binning)
            others = records.take(held_out)
            overlap, agreement = map(torch.from_numpy, (others.overlap, others.agreement))
            predicted = table.predict(overlap, agreement).numpy()
            calibration.observe(predicted, others.acceptance, others.reach_probability())
    return calibration.error
