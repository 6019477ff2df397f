"""Prometheus metrics, with vLLM's names where the meaning is the same."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draftwise.outputs import FinishReason
from draftwise.serving.messages import EngineLoad, EngineOutputs, StepStats

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_BETWEEN_TOKENS_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
)
_ANSWER_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_STEP_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512),
    *(1.024, 2.048),
)
_TOKENS_PER_STEP = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)

_COUNTERS = {
    "draftwise:steps": "Number of steps that generated tokens or processed prompts.",
    "draftwise:request_steps": "Number of requests that received tokens, summed over steps.",
    "draftwise:gained_tokens": "Number of generated tokens.",
    "draftwise:scored_tokens": "Number of drafted tokens scored by the companion.",
    "draftwise:verified_tokens": "Number of drafted tokens verified by the target.",
    "draftwise:dropped_tokens": "Number of drafted tokens that were not verified.",
    "vllm:prompt_tokens": "Number of processed prompt tokens.",
    "vllm:prefix_cache_queries": "Number of prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Number of prompt tokens found in the prefix cache.",
    "vllm:generation_tokens": "Number of generated tokens.",
    "vllm:spec_decode_num_draft_tokens": "Number of drafted tokens verified by the target.",
    "vllm:spec_decode_num_accepted_tokens": "Number of drafted tokens accepted by the target.",
    "vllm:spec_decode_num_drafts": "Number of drafts of which the target verified tokens.",
}
_GAUGES = {
    "vllm:num_requests_running": "Number of running requests.",
    "vllm:num_requests_waiting": "Number of waiting requests.",
    "vllm:kv_cache_usage_perc": "Fraction of the KV cache that is reserved for requests, 0 to 1.",
    "draftwise:lenience": "Current lenience; with values below 1 answers are not lossless.",
    "draftwise:guard_balance_steps": "Steps without drafts that later drafts may cost, up to 16.",
    "draftwise:engine_up": "1 if the engine responds, otherwise 0.",
}


class Metrics:
    """All metrics of a server."""

    def __init__(self) -> None:
        """Register the metrics in a new registry."""
        self._registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=self._registry)

        def labelled(name: str, text: str, label: str) -> Counter:
            return Counter(name, text, [label], registry=self._registry)

        self._first = histogram(
            "vllm:time_to_first_token_seconds",
            "Seconds from the arrival of a request to its first token.",
            _FIRST_TOKEN_SECONDS,
        )
        self._between = histogram(
            "vllm:inter_token_latency_seconds",
            "Seconds between two steps that generated tokens for a request.",
            _BETWEEN_TOKENS_SECONDS,
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds",
            "Seconds from the arrival of a request to its end.",
            _ANSWER_SECONDS,
        )
        self._ended = labelled(
            "vllm:request_success",
            "Number of requests that ended, by finish reason.",
            "finished_reason",
        )
        self._refused = labelled(
            "draftwise:refused_requests", "Number of rejected requests, by reason.", "reason"
        )
        self._counters = {
            name: Counter(name, text, registry=self._registry) for name, text in _COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(name, text, registry=self._registry) for name, text in _GAUGES.items()
        }
        self._by_part = labelled(
            "draftwise:step_seconds_by_part",
            "Seconds spent in steps, by phase of the step.",
            "part",
        )
        self._by_position = labelled(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Number of drafted tokens accepted by the target, by position in the draft.",
            "position",
        )
        self._verified_by_position = labelled(
            "draftwise:verified_tokens_per_pos",
            "Number of drafted tokens verified by the target, by position in the draft.",
            "position",
        )
        self._step = histogram(
            "draftwise:step_seconds", "Seconds per step of the engine.", _STEP_SECONDS
        )
        self._length = histogram(
            "draftwise:tokens_per_request_step",
            "Generated tokens per request in a step, averaged over the batch.",
            _TOKENS_PER_STEP,
        )
        self._restarts = Counter(
            "draftwise:engine_restarts", "Number of lost engines.", registry=self._registry
        )

    def first_token(self, seconds: float) -> None:
        """Record the latency of the first token of a request."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        """Record the latency between two steps of a request."""
        self._between.observe(seconds)

    def ended(self, reason: FinishReason, seconds: float, num_tokens: int) -> None:
        """Count a request that ended, and record its latency unless it generated no token."""
        if num_tokens:
            self._whole.observe(seconds)
        name = "abort" if reason is FinishReason.CANCELLED else reason.value
        self._ended.labels(finished_reason=name).inc()

    def refused(self, reason: str) -> None:
        """Count a rejected request."""
        self._refused.labels(reason=reason).inc()

    def engine_is_up(self, is_up: bool) -> None:
        """Record whether the engine responds."""
        self._gauges["draftwise:engine_up"].set(is_up)

    def engine_was_lost(self) -> None:
        """Count a lost engine."""
        self._restarts.inc()

    def observe(self, outputs: EngineOutputs) -> None:
        """Count outputs of the engine."""
        if outputs.step is not None:
            self._count(outputs.step)
        if outputs.load is not None:
            self._show(outputs.load)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        text: bytes = generate_latest(self._registry)
        return text

    def _count(self, step: StepStats) -> None:
        verified, accepted = sum(step.verified), sum(step.accepted)
        for name, value in {
            "draftwise:steps": step.num_steps,
            "draftwise:request_steps": step.num_requests,
            "draftwise:gained_tokens": step.num_tokens,
            "draftwise:scored_tokens": step.num_scored,
            "draftwise:verified_tokens": verified,
            "draftwise:dropped_tokens": step.num_drafted - verified,
            "vllm:prompt_tokens": step.num_prompt_tokens,
            "vllm:prefix_cache_queries": step.num_prefix_queries,
            "vllm:prefix_cache_hits": step.num_prefix_hits,
            "vllm:generation_tokens": step.num_tokens,
            "vllm:spec_decode_num_draft_tokens": verified,
            "vllm:spec_decode_num_accepted_tokens": accepted,
            "vllm:spec_decode_num_drafts": step.verified[0] if step.verified else 0,
        }.items():
            if value > 0:
                self._counters[name].inc(value)
        for part, seconds in step.seconds.items():
            self._by_part.labels(part=part).inc(max(0.0, seconds))
        for counter, counts in (
            (self._by_position, step.accepted),
            (self._verified_by_position, step.verified),
        ):
            for position, count in enumerate(counts):
                counter.labels(position=str(position)).inc(count)
        self._step.observe(sum(step.seconds.values()))
        if step.num_requests:
            self._length.observe(step.num_tokens / step.num_requests)

    def _show(self, load: EngineLoad) -> None:
        for name, value in {
            "vllm:num_requests_running": load.num_running,
            "vllm:num_requests_waiting": load.num_waiting,
            "vllm:kv_cache_usage_perc": load.cache_usage,
            "draftwise:lenience": load.lenience,
            "draftwise:guard_balance_steps": load.guard_balance,
        }.items():
            if value is not None:
                self._gauges[name].set(value)
