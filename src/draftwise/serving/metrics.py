"""What is counted, for Prometheus: under vLLM's names where they mean the same."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draftwise.outputs import FinishReason
from draftwise.serving.messages import Load, StepFigures, Turn

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

_COUNTED = {
    "draftwise:steps": "Steps in which requests gained tokens or prompts were read.",
    "draftwise:request_steps": "Requests that gained tokens, over all steps.",
    "draftwise:gained_tokens": "Tokens that steps brought.",
    "draftwise:judged_tokens": "Drafted tokens that the companion was asked about.",
    "draftwise:verified_tokens": "Drafted tokens that the target verified.",
    "draftwise:dropped_tokens": "Drafted tokens that were not sent to the target.",
    "vllm:prompt_tokens": "Tokens of prompts that were read.",
    "vllm:generation_tokens": "Tokens that were generated.",
    "vllm:spec_decode_num_draft_tokens": "Drafted tokens that the target verified.",
    "vllm:spec_decode_num_accepted_tokens": "Drafted tokens that the target accepted.",
    "vllm:spec_decode_num_drafts": "Drafts that the target verified something of.",
}
_CURRENT = {
    "vllm:num_requests_running": "Requests that have their place in the batch.",
    "vllm:num_requests_waiting": "Requests that wait for one.",
    "vllm:kv_cache_usage_perc": "Share of the cache that is promised to requests, from 0 to 1.",
    "draftwise:lenience": "Lenience that holds now; below 1 answers are not exactly the target's.",
    "draftwise:calibration_error": "How far the policy's estimates of acceptance are off, 0 to 1.",
    "draftwise:engine_up": "Whether the engine responds.",
}


class RequestMetrics:
    """How long requests take."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register all of them.

        Args:
            registry: of one server.
        """

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._first = histogram(
            "vllm:time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            _FIRST_TOKEN_SECONDS,
        )
        self._between = histogram(
            "vllm:inter_token_latency_seconds",
            "Between two steps that brought a request tokens.",
            _BETWEEN_TOKENS_SECONDS,
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds",
            "From the arrival of a request to its end.",
            _ANSWER_SECONDS,
        )
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended, by why.",
            ["finished_reason"],
            registry=registry,
        )
        self._refused = Counter(
            "draftwise:refused_requests",
            "Requests that were not let in, by why.",
            ["reason"],
            registry=registry,
        )

    def first_token(self, seconds: float) -> None:
        """A request has its first token."""
        self._first.observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        """A request has more tokens, so long after those before."""
        self._between.observe(seconds)

    def ended(self, reason: FinishReason, seconds: float, num_tokens: int) -> None:
        """A request has ended; what gained no token was no answer and its time says nothing."""
        if num_tokens:
            self._whole.observe(seconds)
        name = "abort" if reason is FinishReason.CANCELLED else reason.value
        self._ended.labels(finished_reason=name).inc()

    def refused(self, reason: str) -> None:
        """A request was not let in."""
        self._refused.labels(reason=reason).inc()


class Metrics:
    """All that a server counts.

    Attributes:
        requests: how long they take.
    """

    def __init__(self) -> None:
        """Register all of them in a registry of their own."""
        self._registry = CollectorRegistry()
        self.requests = RequestMetrics(self._registry)
        self._counters = {
            name: Counter(name, text, registry=self._registry) for name, text in _COUNTED.items()
        }
        self._gauges = {
            name: Gauge(name, text, registry=self._registry) for name, text in _CURRENT.items()
        }
        self._by_part = Counter(
            "draftwise:step_seconds_by_part",
            "Where the time of steps goes.",
            ["part"],
            registry=self._registry,
        )
        self._by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that the target accepted, by their place in the draft.",
            ["position"],
            registry=self._registry,
        )
        self._verified_by_position = Counter(
            "draftwise:verified_tokens_per_pos",
            "Drafted tokens that the target verified, by their place in the draft.",
            ["position"],
            registry=self._registry,
        )
        self._step = Histogram(
            "draftwise:step_seconds",
            "Time of a step of the engine.",
            buckets=_STEP_SECONDS,
            registry=self._registry,
        )
        self._length = Histogram(
            "draftwise:tokens_per_request_step",
            "Tokens that a step brings a request, on average over the batch.",
            buckets=_TOKENS_PER_STEP,
            registry=self._registry,
        )
        self._restarts = Counter(
            "draftwise:engine_restarts", "Engines that were lost.", registry=self._registry
        )

    def engine_is_up(self, is_up: bool) -> None:
        """Set whether the engine responds."""
        self._gauges["draftwise:engine_up"].set(is_up)

    def engine_was_lost(self) -> None:
        """Another engine is needed."""
        self._restarts.inc()

    def observe(self, turn: Turn) -> None:
        """Count what a turn of the engine brought."""
        if turn.step is not None:
            self._count(turn.step)
        if turn.load is not None:
            self._show(turn.load)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        text: bytes = generate_latest(self._registry)
        return text

    def _count(self, step: StepFigures) -> None:
        verified, accepted = sum(step.verified), sum(step.accepted)
        for name, value in {
            "draftwise:steps": 1,
            "draftwise:request_steps": step.num_requests,
            "draftwise:gained_tokens": step.num_tokens,
            "draftwise:judged_tokens": step.num_judged,
            "draftwise:verified_tokens": verified,
            "draftwise:dropped_tokens": step.num_drafted - verified,
            "vllm:prompt_tokens": step.num_prompt_tokens,
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

    def _show(self, load: Load) -> None:
        for name, value in {
            "vllm:num_requests_running": load.num_running,
            "vllm:num_requests_waiting": load.num_waiting,
            "vllm:kv_cache_usage_perc": load.cache_usage,
            "draftwise:lenience": load.lenience,
            "draftwise:calibration_error": load.calibration_error,
        }.items():
            if value is not None:
                self._gauges[name].set(value)
