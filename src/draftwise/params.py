"""Parameters set by the caller: sampling per request, speculation per request and per engine."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from draftwise.core.formats import MODEL_FREE_DRAFTS, QUANTIZATIONS, draft_parts
from draftwise.core.rejection import VerificationMethod
from draftwise.errors import InvalidParameterError
from draftwise.structured_outputs import StructuredOutputs
from draftwise.values import (
    boolean,
    integer,
    number,
    path_name,
    path_names,
    plain,
    refuse_deep,
    shown,
    text_name,
)

MAX_SPECULATIVE_TOKENS = 64
# Positions in a corpus are stored in 32 bits.
MAX_CORPUS_TOKENS = 2**30
# The companion name "draft:int8" means the draft model with quantised weights.
_DRAFT_ITSELF = "draft:"
_SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-4, 1e4
# Penalties outside this range make logits overflow or collapse to the same value.
REPETITION_PENALTIES = 1e-3, 1e3
MAX_LOGPROBS = 20


def _mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidParameterError(name, f"must be a mapping, got {shown(value)}")


def _tuple(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidParameterError(name, f"must be a list, got {shown(value)}")
    return tuple(value)


def _set(params: object, **values: object) -> None:
    """Set fields of a frozen dataclass to their validated values."""
    for name, value in values.items():
        object.__setattr__(params, name, value)


def _lenience(name: str, value: object) -> float | Mapping[int, float]:
    """Validate a lenience, or a mapping from load to lenience (JSON gives its keys as strings)."""
    if not isinstance(value, Mapping):
        return number(name, value, 0.0, 1.0, low_open=True)
    rule: dict[int, float] = {}
    for key, each in value.items():
        field_name = f"{name}.{shown(key) if not isinstance(key, str) else key}"
        num_waiting = integer(field_name, _decimal(key), 0)
        rule[num_waiting] = number(field_name, each, 0.0, 1.0, low_open=True)
    if 0 not in rule:
        raise InvalidParameterError(
            name, "a lenience by load needs an entry for 0 waiting requests"
        )
    return MappingProxyType(rule)


def _decimal(key: object) -> object:
    """Convert a string of up to nine decimal digits to an integer; return other values as is."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10:
        return int(key)
    return key


def _rebuild(cls: type[Any], values: dict[str, Any]) -> Any:
    """Construct parameters for pickle and copy, which cannot handle a mapping proxy."""
    return cls(**values)


def _reduced(params: Any) -> tuple[Any, ...]:
    values = {item.name: getattr(params, item.name) for item in fields(params)}
    plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    return _rebuild, (type(params), plain)


def _num_speculative_tokens(value: object) -> int:
    return integer("num_speculative_tokens", value, 0, MAX_SPECULATIVE_TOKENS)


def _num_logprobs(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise InvalidParameterError(
            name,
            f"must be the number of most likely tokens to report, 0 … {MAX_LOGPROBS}, "
            f"got {value!r}",
        )
    return integer(name, value, 0, MAX_LOGPROBS)


def refuse_unknown_keys(where: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Reject unknown keys.

    Raises:
        InvalidParameterError: a key is unknown; suggests the closest known key.
    """
    known = sorted(known)
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise InvalidParameterError(f"{where}.{key}", f"unknown key; {hint}")


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
        stop: strings that end the text. The text is cut before the stop string.
        stop_token_ids: tokens that end the text. The stop token is the last of ``token_ids`` and is
            not part of the text.
        ignore_eos: continue after the model's end-of-sequence token.
        seed: 64-bit seed. The same seed gives the same text, alone or in a batch, unless the
            policy depends on step times or on the batch (``docs/policies.md``). ``None`` draws a
            random seed.
        logprobs: number of most likely tokens, 0 … 20, whose log-probabilities under the target are
            reported at each position beside that of the generated token; ``None`` disables
            log-probabilities.
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
        _set(
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
        _mapping("logit_bias", self.logit_bias)
        bias = {
            integer("logit_bias", token, 0): number("logit_bias", each, -100.0, 100.0)
            for token, each in self.logit_bias.items()
        }
        stop = (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise InvalidParameterError("stop", f"must be non-empty strings, got {shown(stop)}")
        tokens = _tuple("stop_token_ids", self.stop_token_ids)
        _set(
            self,
            logit_bias=MappingProxyType(bias),
            stop=tuple(str(text) for text in stop),
            stop_token_ids=tuple(integer("stop_token_ids", token, 0) for token in tokens),
        )
        if self.seed is not None:
            _set(self, seed=integer("seed", self.seed, -(2**63), 2**64 - 1))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _set(self, **{name: _num_logprobs(name, getattr(self, name))})
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
        return _reduced(self)

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


@dataclass(frozen=True)
class RequestSpeculation:
    """Speculation settings of one request, which override those of the engine.

    Attributes:
        enabled: False decodes the request with the target alone.
        policy: name of the policy, which gets its default options; ``None`` for the engine's
            policy.
        num_speculative_tokens: maximum number of tokens drafted per step, further limited by the
            engine's maximum; ``None`` for the engine's maximum.
        lenience: lenience of the request, in (0, 1]; ``None`` for the engine's lenience.
        draft: the only draft of the engine that the request uses; ``None`` for all of them.

    Raises:
        InvalidParameterError: a value is out of range.
    """

    enabled: bool = True
    policy: str | None = None
    num_speculative_tokens: int | None = None
    lenience: float | None = None
    draft: str | None = None

    def __post_init__(self) -> None:
        boolean("enabled", self.enabled)
        if self.policy is not None:
            text_name("policy", self.policy, "policy")
        if self.num_speculative_tokens is not None:
            _set(self, num_speculative_tokens=_num_speculative_tokens(self.num_speculative_tokens))
        if self.lenience is not None:
            _set(self, lenience=number("lenience", self.lenience, 0.0, 1.0, low_open=True))
        if self.draft is not None:
            _set(self, draft=path_name("draft", self.draft, "model"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RequestSpeculation:
        """Build from external input; unknown keys raise :class:`InvalidParameterError`."""
        refuse_unknown_keys("speculation", values, (item.name for item in fields(cls)))
        return cls(**values)


# Keys of vLLM's --speculative-config and the corresponding field names.
_ALIASES = {"model": "draft"}
_DEFAULT_DRAFT = "suffix"


@dataclass(frozen=True)
class SpeculationConfig:
    """Speculation settings of an engine.

    Paths may be given as :class:`pathlib.Path`; they are stored as strings.

    Attributes:
        draft: name of the draft model (a folder, a hub id or a zoo name such as ``"zoo:draft"``) or
            of a registered proposer that needs no model: ``"suffix"`` and ``"ngram"`` draft from
            the request's own text. ``None`` is ``"suffix"``. A list of ``"suffix"`` and a draft
            model uses both: the policy chooses between them for each request and step.
        corpus: texts that ``"suffix"`` may continue beside the request's own: files with one JSON
            object per line or plain text, folders of them, or a corpus that was saved. All requests
            use them.
        corpus_tokens: maximum number of tokens that are stored for ``"suffix"`` beside the
            requests' own texts. What was continued least recently is dropped first.
        remember_outputs: whether ``"suffix"`` also continues the outputs of earlier requests with
            the same ``cache_salt`` and API key.
        companion: name of the companion model, which scores drafted tokens before the target
            verifies them: a folder, a hub id, a zoo name, or ``"draft:int8"`` or ``"draft:int4"``
            for the draft model with quantised weights.
        policy: name of the policy that decides how many tokens to draft and to verify; ``None`` for
            ``"sv"`` with a companion and ``"adaptive"`` without one.
        policy_options: options of the policy.
        profile: acceptance profile of these models, a file of ``draftwise profile``.
        latency_profile: latency profile of these models on this machine, a file of ``draftwise
            profile-latency``. Without one, policies that need latencies measure them for a few
            seconds at load time.
        num_speculative_tokens: maximum number of tokens drafted per step (γ), 0 … 64.
        lenience: factor on the denominator of the acceptance ratio, in (0, 1]. A value below 1
            accepts more tokens, and the output no longer has the target's distribution. A mapping
            such as ``{0: 1.0, 16: 0.8}`` makes it depend on the load: each key is a number of
            waiting requests from which its lenience applies.
        verification: ``"block"`` for block verification, which accepts more tokens, or ``"token"``
            for token-by-token verification. Both are lossless. Lenience below 1 always uses
            ``"token"``.

    Raises:
        InvalidParameterError: a value is out of range.
    """

    draft: str | Sequence[str] | None = None
    companion: str | None = None
    policy: str | None = None
    policy_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    profile: str | None = None
    latency_profile: str | None = None
    num_speculative_tokens: int = 5
    lenience: float | Mapping[int, float] = field(default=1.0, hash=False)
    verification: VerificationMethod = "block"
    corpus: str | Sequence[str] = ()
    corpus_tokens: int = 1_000_000
    remember_outputs: bool = False

    def __post_init__(self) -> None:
        if self.draft is not None:
            given = path_names("draft", self.draft, "model")
            names = tuple(part for each in given for part in draft_parts(each))
            if not names:
                raise InvalidParameterError("draft", "must name at least one draft")
            _set(self, draft=names[0] if len(names) == 1 else names)
        _set(
            self,
            corpus=path_names("corpus", self.corpus, "file"),
            corpus_tokens=integer("corpus_tokens", self.corpus_tokens, 1, MAX_CORPUS_TOKENS),
            remember_outputs=boolean("remember_outputs", self.remember_outputs),
        )
        if self.policy is not None:
            text_name("policy", self.policy, "policy")
        for name, kind in (
            ("companion", "model"),
            ("profile", "file"),
            ("latency_profile", "file"),
        ):
            if getattr(self, name) is not None:
                _set(self, **{name: path_name(name, getattr(self, name), kind)})
        if self.companion_quantization not in (None, *QUANTIZATIONS):
            known = " and ".join(f"'{_DRAFT_ITSELF}{each}'" for each in QUANTIZATIONS)
            raise InvalidParameterError(
                "companion", f"{self.companion!r} is unknown; a quantised draft is {known}"
            )
        _set(
            self,
            num_speculative_tokens=_num_speculative_tokens(self.num_speculative_tokens),
            lenience=_lenience("lenience", self.lenience),
        )
        if not isinstance(self.verification, str) or self.verification not in ("block", "token"):
            raise InvalidParameterError(
                "verification", f"must be 'block' or 'token', got {shown(self.verification)}"
            )
        _mapping("policy_options", self.policy_options)
        refuse_deep("policy_options", self.policy_options)
        for key in self.policy_options:
            if not isinstance(key, str):
                raise InvalidParameterError("policy_options", f"keys must be strings, got {key!r}")
        options = {key: plain(value) for key, value in self.policy_options.items()}
        _set(self, policy_options=MappingProxyType(options))

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self)

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Names of the draft model and of proposers."""
        if self.draft is None:
            return (_DEFAULT_DRAFT,)
        return (self.draft,) if isinstance(self.draft, str) else tuple(self.draft)

    @property
    def policy_name(self) -> str:
        """Name of the policy; the default depends on whether there is a companion."""
        return self.policy or ("adaptive" if self.companion is None else "sv")

    @property
    def companion_quantization(self) -> str | None:
        """``"int8"`` for the companion ``"draft:int8"``; ``None`` for a separate model."""
        if self.companion is None or not self.companion.startswith(_DRAFT_ITSELF):
            return None
        return self.companion.removeprefix(_DRAFT_ITSELF)

    def lenience_at(self, num_waiting: int) -> float:
        """The lenience that applies while ``num_waiting`` requests wait."""
        if not isinstance(self.lenience, Mapping):
            return self.lenience
        return self.lenience[max(least for least in self.lenience if least <= num_waiting)]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculationConfig:
        """Build from external input, which may use vLLM's key names.

        ``model`` is an alias of ``draft``. ``method`` may be ``"draft_model"``, or ``"ngram"`` or
        ``"suffix"``, which draft without a model. Unknown keys raise
        :class:`InvalidParameterError`.
        """
        values = dict(values)
        method = values.pop("method", "draft_model")
        if method not in ("draft_model", *MODEL_FREE_DRAFTS):
            known = ", ".join(f"'{each}'" for each in MODEL_FREE_DRAFTS)
            raise InvalidParameterError(
                "speculation.method", f"must be 'draft_model', {known}; got {shown(method)}"
            )
        for theirs, ours in _ALIASES.items():
            if theirs in values:
                if ours in values:
                    raise InvalidParameterError(
                        f"speculation.{theirs}", f"is an alias of {ours!r}; give only one of them"
                    )
                values[ours] = values.pop(theirs)
        refuse_unknown_keys("speculation", values, (item.name for item in fields(cls)))
        if method != "draft_model" and values.setdefault("draft", method) != method:
            raise InvalidParameterError(
                "speculation.draft", f"cannot be combined with the method {method!r}; give one"
            )
        return cls(**values)
