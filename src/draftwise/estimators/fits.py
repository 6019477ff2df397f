"""Registry of the fitted estimators that an acceptance profile holds besides its tables."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from draftwise.estimators.classifier import SPECDEC_REJECTION_WEIGHT, AcceptanceHead
from draftwise.estimators.combined import Inputs, SignalModel
from draftwise.estimators.profile import Fit
from draftwise.estimators.records import Records


def estimator_fits(has_companion: bool) -> dict[str, Fit]:
    """Fit functions by the name under which policies look up their parameters.

    Args:
        has_companion: whether the records contain S and A. Without a companion, the estimators
            that use them are left out.
    """
    models = Inputs if has_companion else (Inputs.FREE,)
    fits: dict[str, Fit] = {inputs.value: partial(_fit_signal_model, inputs) for inputs in models}
    fits["disco"] = partial(_fit_head, 1.0)
    fits["specdec++"] = partial(_fit_head, SPECDEC_REJECTION_WEIGHT)
    return fits


def _fit_signal_model(inputs: Inputs, records: Records) -> Mapping[str, Tensor]:
    return SignalModel.fit(records, inputs).to_tensors()


def _fit_head(rejection_weight: float, records: Records) -> Mapping[str, Tensor]:
    return AcceptanceHead.fit(records, rejection_weight).to_tensors()
