"""Information, calibration and goodput of every signal on one recording."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from draftwise.estimators.calibration import reliability
from draftwise.estimators.information import information_gains, pearson
from draftwise.estimators.records import Records
from draftwise.studies.sampling import Sampling
from draftwise.studies.signals import kinds, price
from draftwise.studies.signals.estimate import (
    Floats,
    base_rates,
    code_length,
    mean_over_prompts,
    predictions,
)
from draftwise.studies.signals.kinds import Kind
from draftwise.studies.signals.pass_times import PassTimes
from draftwise.studies.signals.recording import TARGET, Recording

# Signals that are probabilities of acceptance as they are, or are read as such.
_RAW = {
    "q(x)": "token_prob",
    "largest q": "top_prob",
    "confidence head": "confidence",
}
_FIXED = 5


class Measurement:
    """What the signals tell of the acceptance of the tokens of a recording."""

    def __init__(self, recording: Recording, sampling: Sampling, times: PassTimes) -> None:
        """Set up without fitting anything."""
        self._times = times
        self._by_fold: dict[tuple[int, str, str | None, bool], list[price.Fold]] = {}
        self._recording, self._sampling = recording, sampling
        records = recording.records
        self._prompts = np.repeat(recording.prompts, recording.length)
        self._labels = records.acceptance.astype(np.float64)
        self._weights = records.reach_probability().astype(np.float64)
        self._predicted: dict[tuple[str | None, tuple[str, ...]], Floats] = {}
        self._names = [name for name in recording.companions if name != TARGET]

    @property
    def _kinds(self) -> Sequence[Kind]:
        return kinds.without_companion(self._recording.has_confidence)

    @property
    def _companion_kinds(self) -> Sequence[Kind]:
        return kinds.with_companion(self._recording.has_confidence)

    @cached_property
    def _base_lengths(self) -> Floats:
        base = base_rates(self._labels, self._prompts, self._weights)
        return code_length(base, self._labels)

    def _records(self, companion: str | None) -> Records:
        recording = self._recording
        return recording.records if companion is None else recording.companions[companion]

    def predict(self, columns: tuple[str, ...], companion: str | None = None) -> Floats:
        """``[tokens]`` P(accept) of other prompts' models of some signals."""
        key = companion, columns
        if key not in self._predicted:
            self._predicted[key] = predictions(
                self._records(companion), self._prompts, self._weights, columns
            )
        return self._predicted[key]

    def knowledge(self) -> dict[str, Any]:
        """Information and calibration of every kind of signal, in bits per tested token."""
        recording, weights = self._recording, self._weights
        own = kinds.own(recording.has_confidence)
        found: dict[str, Any] = {
            "num_prompts": len(np.unique(recording.prompts)),
            "num_drafts": recording.num_drafts,
            "acceptance": mean_over_prompts(self._labels, weights, self._prompts).to_dict(),
            "entropy": float(np.average(self._base_lengths, weights=weights)),
            "signals": {
                kind.name: self._told(kind.columns) for kind in (*self._kinds, kinds.ORACLE)
            },
            "raw": {
                name: self._calibration(getattr(recording.records, column).astype(np.float64))
                for name, column in _RAW.items()
                if column != "confidence" or recording.has_confidence
            },
            "companions": {},
        }
        for name in self._names:
            records = self._records(name)
            told = {k.name: self._told(k.columns, name) for k in self._companion_kinds}
            both = self.predict(kinds.every(recording.has_confidence).columns, name)
            gain = code_length(self.predict(own.columns), self._labels)
            gain = gain - code_length(both, self._labels)
            binned = information_gains(records)
            found["companions"][name] = {
                "signals": told,
                "beyond_own": mean_over_prompts(gain, weights, self._prompts).to_dict(),
                "binned": {n: binned[n].corrected for n in ("q(x)", "S,A 20x20", "S,A adaptive")},
                "overlap": float(np.average(records.overlap, weights=weights)),
                "correlation": pearson(records.agreement, records.acceptance),
                "overlap_correlation": self._overlap_correlation(records),
            }
        return found

    def _overlap_correlation(self, records: Records) -> float | None:
        """Correlation of S with the overlap of draft and target; ``None`` if that is unknown."""
        of_target = self._recording.companions.get(TARGET)
        return None if of_target is None else pearson(records.overlap, of_target.overlap)

    def _told(self, columns: tuple[str, ...], companion: str | None = None) -> dict[str, Any]:
        predicted = self.predict(columns, companion)
        saved = self._base_lengths - code_length(predicted, self._labels)
        bits = mean_over_prompts(saved, self._weights, self._prompts)
        return {"bits": bits.to_dict(), **self._calibration(predicted)}

    def _calibration(self, predicted: Floats) -> dict[str, Any]:
        error, curve = reliability(predicted, self._labels, self._weights)
        return {"calibration_error": error, "curve": curve}

    # What it gains.

    def goodput(self, batch: int) -> dict[str, Any]:
        """Goodput of deciding by every kind of signal, relative to no speculation.

        The best kind with a companion, and the best without, are chosen on other prompts, as the
        rule of each kind is.
        """
        price_of = partial(self._totals, batch)
        alone, best_static = self._static(batch, 0), price_of([kinds.NONE])
        best_own = price_of(self._kinds)

        def described(totals: list[price.Total]) -> dict[str, Any]:
            return {
                "goodput": price.ratio(totals, alone).to_dict(),
                "over_static": price.ratio(totals, best_static).to_dict(),
                "over_own": price.ratio(totals, best_own).to_dict(),
                **price.per_request(totals, batch),
            }

        fixed = min(_FIXED, self._recording.length)
        found: dict[str, Any] = {
            "fixed": described(self._static(batch, fixed)),
            "signals": {
                kind.name: described(price_of([kind])) for kind in (*self._kinds, kinds.ORACLE)
            },
            "best_own": described(best_own),
            "companions": {},
        }
        for name in self._names:
            free = price_of(self._companion_kinds, name, charges=False)
            found["companions"][name] = {
                "signals": {
                    kind.name: described(price_of([kind], name)) for kind in self._companion_kinds
                },
                "best": described(price_of(self._companion_kinds, name)),
                "free": described(free),
                "affordable": price.affordable_companion(free, best_own),
                "cost": self._companion_cost(batch, name, free),
            }
        return found

    def _companion_cost(self, batch: int, name: str, totals: list[price.Total]) -> float:
        """Time of a companion's pass, relative to the target's pass.

        It is that over the drafted tokens, of which there is at least one for each request.
        """
        whole = price.Total.join(totals)
        scored = max(whole.drafted / whole.steps, batch)
        return self._times.companions[name](scored) * whole.steps / whole.target

    def _survival(self, columns: tuple[str, ...], companion: str | None) -> Floats:
        """``[drafts, length]`` estimated probability that the tokens up to each are accepted."""
        predicted = self.predict(columns, companion)
        if "acceptance" in columns:
            predicted = self._labels
        return predicted.reshape(-1, self._recording.length).cumprod(axis=1)

    def _totals(
        self,
        batch: int,
        candidates: Sequence[Kind],
        companion: str | None = None,
        charges: bool = True,
    ) -> list[price.Total]:
        """What each fold gains and takes by the best of some kinds of signals.

        A companion's pass takes no time without ``charges``.
        """
        every = [self._folds(batch, kind, companion, charges) for kind in candidates]
        return price.held_out_totals(every)

    def _folds(
        self, batch: int, kind: Kind, companion: str | None, charges: bool
    ) -> list[price.Fold]:
        """See :func:`draftwise.studies.signals.price.by_fold`; computed once for each choice."""
        key = batch, kind.name, companion, charges
        if key not in self._by_fold:
            length, greedy = self._recording.length, self._sampling.is_greedy
            charged = companion if charges else None
            survival = self._survival(kind.columns, companion)
            own = kind.while_drafting
            self._by_fold[key] = price.by_fold(
                kind,
                price.Costs.of(self._times, kind, charged, batch, length, greedy),
                self._recording.prompts,
                batch,
                self._labels.reshape(-1, length),
                survival,
                self._survival(own, None) if own else np.ones_like(survival),
            )
        return self._by_fold[key]

    def _static(self, batch: int, length: int) -> list[price.Total]:
        recording = self._recording
        costs = price.Costs.of(
            self._times, kinds.NONE, None, batch, recording.length, self._sampling.is_greedy
        )
        acceptance = self._labels.reshape(-1, recording.length)
        return price.static_totals(length, costs, recording.prompts, batch, acceptance)
