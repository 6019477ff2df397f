"""Options of pricing, which all policies that use prices share."""

from __future__ import annotations

from dataclasses import dataclass

from draftwise.policies.options import integer_option, number_option


@dataclass(frozen=True)
class PricingOptions:
    """Options of pricing. Every field is an option of the policies that use prices.

    Attributes:
        explore_every: number of steps between two explorations at one batch size. In an exploration
            a request's whole draft is verified. Tokens that are never verified teach nothing about
            acceptance. The interval doubles while nothing is drafted between two explorations, up
            to eight times this number.
        learn_every: number of steps between two steps that are learnt from. In these steps signals
            are computed even if they decide nothing. Computing signals and learning take time.
        warm_up: number of first steps, of which every other one is learnt from, because the first
            estimates are guesses.
        review_every: maximum number of steps between two reviews of the operating point, because a
            review takes some milliseconds. The pause between reviews is as long as a trial during
            the first steps, up to this number, and doubles after them.
        trial_steps: number of steps of a trial. The challenger and the point in use take turns in
            it, so a change of the machine's speed affects both.
        memory: number of drafts that are remembered, and number of steps that are remembered at one
            batch size. Older ones are forgotten, because the workload changes.
        prior_steps: weight of the prior in the step-time correction of an operating point, in
            steps at that point. The prior comes from points of the same kind.
        exploration_bonus: relative error of an estimate that is based on one step. A point with few
            steps may be better than its estimate by this much.
        num_thresholds: number of thresholds that are compared, evenly spaced between 0 and 1.
        acceptance_guess: mean acceptance of drafted tokens before any token was verified.
    """

    explore_every: int = 64
    learn_every: int = 8
    warm_up: int = 64
    review_every: int = 256
    trial_steps: int = 24
    memory: int = 512
    prior_steps: int = 8
    exploration_bonus: float = 0.1
    num_thresholds: int = 12
    acceptance_guess: float = 0.6

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidParameterError: a field is out of range; names ``policy_options.NAME``.
        """
        lowest = {"explore_every": 2, "warm_up": 0, "num_thresholds": 0, "trial_steps": 2}
        for name, value in vars(self).items():
            if name in ("exploration_bonus", "acceptance_guess"):
                low, high = (0.0, 1.0) if name == "exploration_bonus" else (0.05, 0.95)
                number_option(name, value, low, high)
            else:
                integer_option(name, value, lowest.get(name, 1))
