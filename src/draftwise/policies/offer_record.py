"""What is known of steps with and without offered tokens, at similar batch sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Weight of a step relative to the step after it.
_FORGETTING = 0.97
# Number of steps without offers after which their time is known.
_MIN_RESTS = 3
# Standard deviation of a step's duration, relative to its mean.
_SPREAD_OF_SECONDS = 0.05
# Weight of the cost model where little was measured, in steps whose duration offers double.
_EXCESS_PRIOR = 1.0
# What tokens add is at least and at most this factor times the cost model's.
_EXCESS_RANGE = (0.5, 2.0)


@dataclass
class OfferRecord:
    """Recent steps of similar batch sizes, relative to the cost model.

    Attributes:
        num_looks, num_requests, tokens: sums over steps that looked for offers: their number, their
            requests, and the tokens that they gained.
        squares: sum of the squares of the tokens of each step, divided by its number of requests.
        tokens_alone: tokens that the same time would have gained without offers, by the cost model.
        num_rests: number of steps that did not look for offers.
        slowdown: their mean duration, relative to the cost model's.
        others: mean duration of their parts before the target's pass, relative to the same.
        num_steps: number of steps of both kinds.
        expected, added: what verified tokens were expected to add to steps, and what they added,
            relative to steps without offers; sums over steps.
    """

    num_looks: float = 0.0
    num_requests: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    tokens_alone: float = 0.0
    num_rests: int = 0
    slowdown: float = 0.0
    others: float = 0.0
    num_steps: int = 0
    expected: float = 0.0
    added: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the duration of a step without offers is known."""
        return self.num_rests >= _MIN_RESTS

    @property
    def correction(self) -> float:
        """Factor of the cost model's duration of a step without offers; 1 until it is known."""
        return self.slowdown if self.is_known else 1.0

    @property
    def excess(self) -> float:
        """What verified tokens add to a step, relative to the cost model."""
        ratio = (self.added + _EXCESS_PRIOR) / (self.expected + _EXCESS_PRIOR)
        return min(max(ratio, _EXCESS_RANGE[0]), _EXCESS_RANGE[1])

    @property
    def gain(self) -> float:
        """Goodput of steps that looked for offers, relative to the others; 1 without any."""
        return self.tokens * self.correction / self.tokens_alone if self.tokens_alone else 1.0

    @property
    def loses(self) -> bool:
        """Whether looking for offers is a loss, even if the gain is two standard errors higher.

        The duration of a step without offers must be known.
        """
        if not self.num_looks:
            return False
        mean = self.tokens / self.num_requests
        variance = max(self.squares / self.num_requests - mean**2, 0.0) / mean**2
        # Where no token was accepted so far, the next one may be.
        of_tokens = max(math.sqrt(variance / self.num_looks), 1.0 / self.num_requests)
        num_rests = min(self.num_rests, 1.0 / (1.0 - _FORGETTING))
        of_seconds = _SPREAD_OF_SECONDS * math.sqrt(1.0 / self.num_looks + 1.0 / num_rests)
        error = math.hypot(of_tokens, of_seconds)
        return self.gain * (1.0 + 2.0 * error) < 1.0

    def observe_look(self, num_requests: int, num_tokens: float, slowdown: float) -> None:
        """Add a step that looked for offers.

        Args:
            num_requests: its number of requests.
            num_tokens: number of gained tokens.
            slowdown: its duration, relative to one without offers by the cost model.
        """
        self.num_looks = _FORGETTING * self.num_looks + 1.0
        self.num_requests = _FORGETTING * self.num_requests + num_requests
        self.tokens = _FORGETTING * self.tokens + num_tokens
        self.squares = _FORGETTING * self.squares + num_tokens**2 / num_requests
        self.tokens_alone = _FORGETTING * self.tokens_alone + num_requests * slowdown

    def observe_added(self, expected: float, pass_duration: float | None) -> None:
        """Add what the verified tokens of a step added to it. Steps without offers must be known.

        Args:
            expected: what they add by the cost model, relative to a step without offers.
            pass_duration: relative duration of the target's pass and of what follows; ``None`` if
                no tokens were verified.
        """
        self.expected *= _FORGETTING
        self.added *= _FORGETTING
        if pass_duration is not None:
            # Without the search and the selection, which hardly depend on the number of tokens. A
            # draft model may read tokens in both kinds of steps.
            self.expected += expected
            self.added += pass_duration - (self.slowdown - self.others)

    def observe_rest(self, slowdown: float, others: float) -> None:
        """Add a step that did not look for offers.

        Args:
            slowdown: its duration, relative to that by the cost model.
            others: duration of its parts before the target's pass, relative to the same.
        """
        self.num_rests += 1
        # A mean over all of them at first, and over recent ones later.
        weight = max(1 / self.num_rests, 1 - _FORGETTING)
        self.slowdown += weight * (slowdown - self.slowdown)
        self.others += weight * (others - self.others)
