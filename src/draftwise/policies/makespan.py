"""What gained tokens are worth until a batch ends.

Where further requests wait, every gained token saves the same time. In a batch that nobody joins,
the request that ends last decides how long the batch takes. Tokens of the other requests save only
what their rows add to the steps near the end.

Without drafts, a batch whose requests have m_1 ≥ m_2 ≥ … tokens left takes
``Σ_i m_i · (t(i) − t(i−1))`` seconds, where t(i) is the time of a step with i requests. The
decrease of this time is what gained tokens are worth. It is measured in tokens: a step without
drafts gains one token for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from draftwise.policies.inputs import RequestState

Floats = NDArray[np.float64]

# How sure it is that requests end at their limit. Many texts end before it, and a request that is
# behind may gain later.
_CERTAINTY = 0.75


class Makespan:
    """The worth of tokens in one step."""

    def __init__(self, requests: Sequence[RequestState], seconds: Callable[[float], float]) -> None:
        """Begin a step.

        Args:
            requests: of the step.
            seconds: time of a step without drafts, by the number of requests.
        """
        left = [request.num_left for request in requests if request.num_left is not None]
        self._is_closed = 0 < len(requests) == len(left)
        if self._is_closed:
            self._left = np.array(left, np.float64)
            times = np.array([seconds(size) for size in range(len(left) + 1)])
            self._added = np.diff(times) * len(left) / times[-1]

    def worth(self, gained: Floats) -> float:
        """Worth of gained tokens, in tokens of a batch that others join.

        Args:
            gained: ``[batch]`` number of gained tokens of each request.
        """
        number = float(gained.sum())
        if not self._is_closed:
            return number
        after = np.maximum(self._left - gained, 0.0)
        saved = self._remaining(self._left) - self._remaining(after)
        return _CERTAINTY * saved + (1.0 - _CERTAINTY) * number

    def _remaining(self, left: Floats) -> float:
        """Time of the batch without drafts, in tokens."""
        return float(np.sort(left)[::-1] @ self._added)
