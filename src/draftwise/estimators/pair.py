"""One model of acceptance for sampled requests, one for greedy ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftwise.errors import InvalidParameterError
from draftwise.estimators.combined import Floats, Inputs, SignalModel, Signals

Booleans = NDArray[np.bool_]


class ModelPair(dict[bool, SignalModel]):
    """Models of acceptance by whether a request is greedy.

    At temperature 0 a token is accepted if the target agrees and the draft says its likeliest, so
    that the same signals mean something else.
    """

    @classmethod
    def of(cls, inputs: Inputs, parameters: Mapping[str, Mapping[str, Tensor]]) -> ModelPair:
        """Both from what a profile knows of these inputs, or from the general start.

        Raises:
            InvalidParameterError: the profile's numbers are not those of this estimator.
        """
        if inputs.value not in parameters:
            return cls({greedy: SignalModel(inputs) for greedy in (False, True)})
        known = dict(parameters[inputs.value])
        try:
            return cls({g: SignalModel.from_tensors(inputs, known) for g in (False, True)})
        except (KeyError, ValueError) as error:
            raise InvalidParameterError(
                "profile", f"its {inputs.value!r} estimate does not fit this version: {error}"
            ) from error

    def predict(self, signals: Signals, greedy: Booleans) -> Floats:
        """``[n]`` probabilities that tokens are accepted; ``greedy`` is ``[n]``."""
        if not greedy.any():
            return self[False].predict(signals)
        if greedy.all():
            return self[True].predict(signals)
        return np.where(greedy, self[True].predict(signals), self[False].predict(signals))

    def observe(
        self, signals: Signals, greedy: Booleans, acceptance: Floats, reached: Floats
    ) -> None:
        """Show ``n`` scored tokens to the model of their kind."""
        for kind, model in self.items():
            chosen = greedy == kind
            if chosen.any():
                part = {name: values[chosen] for name, values in vars(signals).items()}
                model.observe(replace(signals, **part), acceptance[chosen], reached[chosen])
