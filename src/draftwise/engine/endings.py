"""The expected number of tokens until a request ends."""

from __future__ import annotations

from draftwise.engine.request import Request
from draftwise.outputs import FinishReason

# Weight of an ended request relative to the request that ends after it.
_FORGETTING = 0.99


class Endings:
    """Learns how often a text ends by itself, from the requests that ended.

    Each token is assumed to be the last one with the same probability. A text also ends at its
    maximum number of tokens.
    """

    def __init__(self) -> None:
        """Start without observations: texts end at their maximum length."""
        self._num_stops = 0.0
        self._num_tokens = 0.0

    def observe(self, request: Request) -> None:
        """Learn from a request that ended."""
        if request.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        is_stop = request.finish_reason is FinishReason.STOP
        self._num_stops = _FORGETTING * self._num_stops + is_stop
        self._num_tokens = _FORGETTING * self._num_tokens + request.num_output_tokens

    def expected_remaining(self, request: Request) -> float:
        """Expected number of tokens until a request ends.

        With the probability h that a token is the last one and m tokens left at most, this is
        (1 − (1 − h)^m) / h.
        """
        most = request.max_total_tokens - len(request.tokens)
        if not self._num_stops:
            return float(most)
        probability = min(1.0, self._num_stops / max(self._num_tokens, 1.0))
        return float((1.0 - (1.0 - probability) ** most) / probability)
