"""What a profile holds beside its tables: every estimator that is fitted to records."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from draftwise.estimators.classifier import SPECDEC_REJECTION_WEIGHT, AcceptanceHead
from draftwise.estimators.combined import Inputs, SignalModel
from draftwise.estimators.profile import Fit
from draftwise.estimators.records import Records


def estimator_fits(has_companion: bool) -> dict[str, Fit]:
    """Fits by the name under which policies look for them.

    Args:
        has_companion: whether S and A mean anything; without, nothing is fitted to them.
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
