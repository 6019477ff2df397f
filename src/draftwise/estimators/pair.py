"""A pair of acceptance models, one for sampled and one for greedy requests."""

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
    """Acceptance models by whether a request is greedy.

    At temperature 0 the draft proposes its most likely token, and the token is accepted if it is
    also the target's most likely token. The same signals therefore imply other acceptance
    probabilities than at higher temperatures.
    """

    @classmethod
    def of(cls, inputs: Inputs, parameters: Mapping[str, Mapping[str, Tensor]]) -> ModelPair:
        """Create both models from a profile's parameters, or from the built-in weights.

        Args:
            inputs: the signals that the models use.
            parameters: a profile's parameters by estimator; built-in weights are used if there are
                none for these inputs.

        Raises:
            InvalidParameterError: the profile's parameters do not fit this estimator.
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
        """``[n]`` estimated acceptance probabilities; ``greedy`` is ``[n]``."""
        if not greedy.any():
            return self[False].predict(signals)
        if greedy.all():
            return self[True].predict(signals)
        return np.where(greedy, self[True].predict(signals), self[False].predict(signals))

    def observe(
        self, signals: Signals, greedy: Booleans, acceptance: Floats, reach_probability: Floats
    ) -> None:
        """Update each model with the tokens of its kind of request.

        Args:
            signals: signals of ``n`` tokens.
            greedy: ``[n]`` whether the request of each token is greedy.
            acceptance: ``[n]`` acceptance probability of each token.
            reach_probability: ``[n]`` probability that all tokens before it are accepted.
        """
        for kind, model in self.items():
            chosen = greedy == kind
            if chosen.any():
                part = {name: values[chosen] for name, values in vars(signals).items()}
                model.observe(
                    replace(signals, **part), acceptance[chosen], reach_probability[chosen]
                )
