"""Sampling parameters of a request, set by the caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from draftwise.errors import InvalidParameterError
from draftwise.structured_outputs import StructuredOutputs
from draftwise.values import (
    boolean,
    integer,
    mapping,
    number,
    reduced,
    refuse_unknown_keys,
    set_fields,
    shown,
)

_SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-4, 1e4
# Penalties outside this range make logits overflow or collapse to the same value.
REPETITION_PENALTIES = 1e-3, 1e3
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters and stop conditions of one request.

    Attributes:
        max_tokens: maximum number of tokens to generate. 0 generates nothing and only computes
            ``prompt_logprobs``.
        temperature: divides the logits, from 1e-4 to 1e4; 0 for greedy decoding.
        top_p: keep the smallest set of most likely tokens whose total probability reaches this
            value, in (0, 1]; 1 disables the filter.
        top_k: number of most likely tokens to keep; 0 or -1 disables the filter.
        min_p: drop tokens whose probability is below this fraction of the largest probability, in
            [0, 1]; 0 disables the filter.
        repetition_penalty: divides the positive logits, and multiplies the negative logits, of
            tokens that occur in the prompt or the output, in [0.001, 1000]; 1 disables it.
        presence_penalty: subtracted from the logits of tokens that occur in the output, in
            [-2, 2].
        frequency_penalty: subtracted from the logit of a token once for each of its occurrences in
            the output, in [-2, 2].
        logit_bias: mapping from token id to a number in [-100, 100] that is added to its logit.
        stop: strings that end the text. The text is cut before the stop string. Stop strings are
            also found in the text with special tokens, such as ``"<|im_end|>\\nuser"``.
        stop_token_ids: tokens that end the text. The stop token is the last of ``token_ids`` and is
            not part of the text.
        ignore_eos: continue after the model's end-of-sequence token.
        seed: 64-bit seed. The same seed gives the same text, alone or in a batch, unless the
            policy depends on step times or on the batch (``docs/policies.md``). ``None`` draws a
            random seed.
        logprobs: report the target's log-probabilities of every generated token and of this many
            most likely tokens at each position, 0 … 20; ``None`` for no log-probabilities.
        structured_outputs: grammar that the text must match; ``None`` for unconstrained text.
        prompt_logprobs: like ``logprobs``, for each prompt token except the first.
        min_tokens: number of tokens, at most ``max_tokens``, before which the output does not end:
            end-of-sequence and stop tokens are masked and stop strings are not matched. Constrained
            text still ends earlier where the grammar allows no other token.
        cache_salt: only requests with the same salt share cached prefixes. With different salts,
            the speed of one request does not tell what another one contained.

    Raises:
        InvalidParameterError: a value is out of range.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        set_fields(
            self,
            max_tokens=integer("max_tokens", self.max_tokens, 0),
            min_tokens=integer("min_tokens", self.min_tokens, 0),
            temperature=number("temperature", self.temperature, 0.0, LARGEST_TEMPERATURE),
            top_p=number("top_p", self.top_p, 0.0, 1.0, low_open=True),
            top_k=max(0, integer("top_k", self.top_k, -1)),
            min_p=number("min_p", self.min_p, 0.0, 1.0),
            repetition_penalty=number(
                "repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES
            ),
            presence_penalty=number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            frequency_penalty=number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            ignore_eos=boolean("ignore_eos", self.ignore_eos),
        )
        if not isinstance(self.cache_salt, str):
            raise InvalidParameterError(
                "cache_salt", f"must be a string, got {shown(self.cache_salt)}"
            )
        if self.min_tokens > self.max_tokens:
            raise InvalidParameterError(
                "min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}"
            )
        if 0 < self.temperature < _SMALLEST_TEMPERATURE:
            raise InvalidParameterError(
                "temperature",
                f"{self.temperature!r} is too small to divide by; use 0 for greedy decoding",
            )
        mapping("logit_bias", self.logit_bias)
        bias = {
            integer("logit_bias", token, 0): number("logit_bias", each, -100.0, 100.0)
            for token, each in self.logit_bias.items()
        }
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise InvalidParameterError("stop", f"must be non-empty strings, got {shown(stop)}")
        tokens = _tuple("stop_token_ids", self.stop_token_ids)
        set_fields(
            self,
            logit_bias=MappingProxyType(bias),
            stop=tuple(str(text) for text in stop),
            stop_token_ids=tuple(integer("stop_token_ids", token, 0) for token in tokens),
        )
        if self.seed is not None:
            set_fields(self, seed=integer("seed", self.seed, -(2**63), 2**64 - 1))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                set_fields(self, **{name: _num_logprobs(name, getattr(self, name))})
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise InvalidParameterError(
                "structured_outputs",
                f"must be a StructuredOutputs, got {shown(self.structured_outputs)}",
            )
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidParameterError(
                "ignore_eos",
                "cannot be combined with structured_outputs, which decide where to end",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    @property
    def uses_penalties(self) -> bool:
        """Whether the distribution depends on the counts of earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from external input; unknown keys raise :class:`InvalidParameterError`."""
        refuse_unknown_keys("sampling", values, (item.name for item in fields(cls)))
        grammar = values.get("structured_outputs")
        if isinstance(grammar, Mapping):
            known = (item.name for item in fields(StructuredOutputs))
            refuse_unknown_keys("structured_outputs", grammar, known)
            values = {**values, "structured_outputs": StructuredOutputs(**grammar)}
        return cls(**values)


def _tuple(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidParameterError(name, f"must be a list, got {shown(value)}")
    return tuple(value)


def _num_logprobs(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise InvalidParameterError(
            name,
            f"must be the number of most likely tokens to report, 0 … {MAX_LOGPROBS}, "
            f"got {value!r}",
        )
    return integer(name, value, 0, MAX_LOGPROBS)
