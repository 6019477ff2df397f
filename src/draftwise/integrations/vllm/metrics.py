"""What the worker counts, for Prometheus, next to vLLM's own ``vllm:*``.

vLLM counts no step in which a request drafted nothing; here every step of a generating request
counts, so that ``1 + accepted / request_steps`` is the number of tokens that a step brings.
"""

from __future__ import annotations

from prometheus_client import Counter

from draftwise.integrations.vllm.steps import Settled

# Counted name, what it is, and where it comes from.
_COUNTED = {
    "request_steps": "Steps of generating requests, those without a draft included.",
    "drafted_tokens": "Tokens drafted.",
    "verified_tokens": "Drafted tokens that the target verified.",
    "dropped_tokens": "Drafted tokens that were not sent to the target.",
    "accepted_tokens": "Drafted tokens that the target accepted.",
    "steps": "Steps of the engine in which requests generate.",
    "judged_steps": "Steps in which the companion was asked.",
    "step_seconds": "Time of those steps.",
    "draft_seconds": "Of that, time of the draft model.",
    "companion_seconds": "Of that, time of the companion where it judged.",
    "select_seconds": "Of that, time of the policy's choice.",
    "expected_tokens": "Tokens that the policy expected its steps to bring.",
    "gained_tokens": "Tokens that they brought.",
}


class Metrics:
    """Counters of one worker; in several processes with ``PROMETHEUS_MULTIPROC_DIR``."""

    def __init__(self) -> None:
        """Register all of them; once per process."""
        self._counters = {
            name: Counter(f"draftwise:{name}", text) for name, text in _COUNTED.items()
        }
        self._by_position = Counter(
            "draftwise:accepted_tokens_per_position",
            "Drafted tokens that the target accepted, by their place in the draft.",
            ["position"],
        )

    def observe(self, step: Settled) -> None:
        """Count one step."""
        verified, accepted = sum(step.num_verified), sum(step.num_accepted)
        values = {
            "request_steps": len(step.num_verified),
            "drafted_tokens": step.num_drafted,
            "verified_tokens": verified,
            "dropped_tokens": step.num_drafted - step.num_sent,
            "accepted_tokens": accepted,
            "steps": 1,
            "judged_steps": int(step.judged),
            "step_seconds": step.times.total,
            "draft_seconds": step.times.draft,
            "companion_seconds": step.times.companion,
            "select_seconds": step.times.select,
            "expected_tokens": step.expected_tokens,
            "gained_tokens": accepted + len(step.num_verified),
        }
        for name, value in values.items():
            self._counters[name].inc(value)
        for position in range(max(step.num_accepted, default=0)):
            count = sum(number > position for number in step.num_accepted)
            self._by_position.labels(position=str(position)).inc(count)
