"""Prometheus metrics of the worker, in addition to vLLM's own ``vllm:*``.

vLLM's metrics leave out steps in which a request has no draft. Here every step of a generating
request counts, so that ``1 + accepted_tokens / request_steps`` is the mean number of tokens that a
request gains per step.
"""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter

from draftwise.integrations.vllm.steps import StepResult

# Name and help text of each counter.
_COUNTERS = {
    "request_steps": "Steps of generating requests, including those without a draft.",
    "drafted_tokens": "Tokens drafted.",
    "verified_tokens": "Drafted tokens that the target verified.",
    "dropped_tokens": "Drafted tokens that were not sent to the target.",
    "accepted_tokens": "Drafted tokens that the target accepted.",
    "steps": "Steps of the engine with generating requests.",
    "scored_steps": "Steps in which the companion scored the draft.",
    "step_seconds": "Time of the steps with generating requests.",
    "draft_seconds": "Time of the draft model in these steps.",
    "companion_seconds": "Time of the companion in these steps.",
    "select_seconds": "Time of the policy's selection in these steps.",
    "gained_tokens": "Tokens that the requests gained.",
}


class Metrics:
    """Counters of a process, shared between processes by ``PROMETHEUS_MULTIPROC_DIR``.

    Several engines in one process add to the same counters.
    """

    def __init__(self) -> None:
        """Register the counters, unless the process has them already."""
        self._counters = {name: _counter(name, text) for name, text in _COUNTERS.items()}
        self._by_position = _counter(
            "accepted_tokens_per_position",
            "Drafted tokens that the target accepted, by position in the draft.",
            ("position",),
        )

    def observe(self, step: StepResult) -> None:
        """Add one step to the counters.

        Without a request that gained a token, the time until the next step is not the step's: all
        of its requests have ended, or their prompts are processed, and the engine may have been
        idle. Only the drafted tokens count then.
        """
        if not step.num_verified:
            self._counters["drafted_tokens"].inc(step.num_drafted)
            self._counters["dropped_tokens"].inc(step.num_drafted - step.num_sent)
            return
        verified, accepted = sum(step.num_verified), sum(step.num_accepted)
        values = {
            "request_steps": len(step.num_verified),
            "drafted_tokens": step.num_drafted,
            "verified_tokens": verified,
            "dropped_tokens": step.num_drafted - step.num_sent,
            "accepted_tokens": accepted,
            "steps": 1,
            "scored_steps": int(step.scored),
            "step_seconds": step.times.total,
            "draft_seconds": step.times.draft,
            "companion_seconds": step.times.companion,
            "select_seconds": step.times.select,
            "gained_tokens": accepted + len(step.num_verified),
        }
        for name, value in values.items():
            self._counters[name].inc(value)
        for position in range(max(step.num_accepted, default=0)):
            count = sum(number > position for number in step.num_accepted)
            self._by_position.labels(position=str(position)).inc(count)


@cache
def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
    """The counter of this name. prometheus_client refuses to register one twice."""
    return Counter(f"draftwise:{name}", text, labels)
