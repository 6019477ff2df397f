"""What a caller may set: sampling per request, speculation per engine."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from draftwise.core.formats import QUANTIZATIONS
from draftwise.core.rejection import VerificationMethod
from draftwise.errors import InvalidParameterError
from draftwise.structured_outputs import StructuredOutputs
from draftwise.values import (
    boolean,
    integer,
    number,
    path_name,
    plain,
    refuse_deep,
    shown,
    text_name,
)

MAX_SPECULATIVE_TOKENS = 64
# A companion called "draft:int8" is the draft itself with quantised weights.
_DRAFT_ITSELF = "draft:"
_SMALLEST_TEMPERATURE, LARGEST_TEMPERATURE = 1e-4, 1e4
# Beyond these, logits overflow or all become one.
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
    """Replace fields of a frozen dataclass by what they were made into."""
    for name, value in values.items():
        object.__setattr__(params, name, value)


def _lenience(name: str, value: object) -> float | Mapping[int, float]:
    """Check a lenience, or one by load (its keys may be strings, as in JSON)."""
    if not isinstance(value, Mapping):
        return number(name, value, 0.0, 1.0, low_open=True)
    rule: dict[int, float] = {}
    for key, each in value.items():
        field_name = f"{name}.{shown(key) if not isinstance(key, str) else key}"
        start = integer(field_name, _decimal(key), 0)
        rule[start] = number(field_name, each, 0.0, 1.0, low_open=True)
    if 0 not in rule:
        raise InvalidParameterError(name, "a rule by load must say what holds from 0 waiting on")
    return MappingProxyType(rule)


def _decimal(key: object) -> object:
    """The number that a string of up to nine digits says; anything else as it is."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10:
        return int(key)
    return key


def _rebuild(cls: type[Any], values: dict[str, Any]) -> Any:
    """For pickle and copy, which cannot take a read-only view of a dictionary."""
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
            f"must say how many of the most likely tokens to report, 0 … {MAX_LOGPROBS}, "
            f"got {value!r}",
        )
    return integer(name, value, 0, MAX_LOGPROBS)


def refuse_unknown_keys(where: str, keys: Iterable[str], known: Iterable[str]) -> None:
    """Raise :class:`InvalidParameterError` for the first key that is not known, with a hint."""
    known = sorted(known)
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise InvalidParameterError(f"{where}.{key}", f"unknown key; {hint}")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends.

    Attributes:
        max_tokens: most tokens to generate; 0 only reads the prompt, for ``prompt_logprobs``.
        temperature: 0 for greedy decoding, otherwise (from 1e-4 to 1e4) divides the logits.
        top_p: keep the most likely tokens whose mass reaches this, in (0, 1]; 1 is off.
        top_k: keep this many most likely tokens; 0 is off, and so is -1, which becomes 0.
        min_p: drop tokens less likely than this times the most likely one, in [0, 1]; 0 is off.
        repetition_penalty: divides positive (multiplies negative) logits of tokens in prompt or
            output, in [0.001, 1000]; 1 is off.
        presence_penalty: subtracted from the logits of tokens in the output, in [-2, 2].
        frequency_penalty: the same times the number of occurrences, in [-2, 2].
        logit_bias: token id to a number in [-100, 100] added to its logit.
        stop: strings that end the text; the text is cut before them.
        stop_token_ids: tokens that end the text; they are the last of ``token_ids`` and not in
            the text.
        ignore_eos: go on after the model's end-of-sequence token.
        seed: 64-bit seed. The same seed gives the same text, alone or in a batch, unless the
            policy goes by step times or by the batch (``docs/policies.md``). ``None`` draws one.
        logprobs: report the target's log-probability of each generated token and of this many most
            likely ones at its place, 0 … 20; ``None`` reports none.
        structured_outputs: the form that the text must have; ``None`` for any.
        prompt_logprobs: report the target's log-probability of each prompt token but the first,
            and of this many most likely ones at its place, 0 … 20; ``None`` reports none.
        min_tokens: no end-of-sequence or stop token comes before this many other tokens, and no
            stop string is looked for in their text, at most ``max_tokens``. A text that must have
            a form ends all the same where the form leaves nothing else.

    Raises:
        InvalidParameterError: a value lies outside its range.
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
                "ignore_eos", "a text that must have a form ends where the form does"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self)

    @property
    def uses_penalties(self) -> bool:
        """Whether the distribution depends on which tokens were said before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from outside input, refusing unknown keys by name."""
        refuse_unknown_keys("sampling", values, (item.name for item in fields(cls)))
        form = values.get("structured_outputs")
        if isinstance(form, Mapping):
            known = (item.name for item in fields(StructuredOutputs))
            refuse_unknown_keys("structured_outputs", form, known)
            values = {**values, "structured_outputs": StructuredOutputs(**form)}
        return cls(**values)


@dataclass(frozen=True)
class RequestSpeculation:
    """How one request speculates, where it differs from the engine.

    Attributes:
        enabled: False decodes it with the target alone.
        policy: name of its policy, with standard options; ``None`` for the engine's.
        num_speculative_tokens: most tokens drafted for it per step; the engine's limit holds too.
        lenience: its own, in (0, 1]; ``None`` for the engine's.

    Raises:
        InvalidParameterError: a value lies outside its range.
    """

    enabled: bool = True
    policy: str | None = None
    num_speculative_tokens: int | None = None
    lenience: float | None = None

    def __post_init__(self) -> None:
        boolean("enabled", self.enabled)
        if self.policy is not None:
            text_name("policy", self.policy, "policy")
        if self.num_speculative_tokens is not None:
            _set(self, num_speculative_tokens=_num_speculative_tokens(self.num_speculative_tokens))
        if self.lenience is not None:
            _set(self, lenience=number("lenience", self.lenience, 0.0, 1.0, low_open=True))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RequestSpeculation:
        """Build from outside input, refusing unknown keys by name."""
        refuse_unknown_keys("speculation", values, (item.name for item in fields(cls)))
        return cls(**values)


# Keys of vLLM's --speculative-config that mean the same here under another name.
_ALIASES = {"model": "draft"}


@dataclass(frozen=True)
class SpeculationConfig:
    """How drafts are made, chosen and accepted.

    Attributes:
        draft: the draft model: a folder, a hub id or a zoo name such as ``"zoo:draft"``. Folders
            and files may be given as :class:`pathlib.Path`; what is kept is a string.
        companion: the model that judges the draft: a folder, a hub id, a zoo name, or
            ``"draft:int8"`` or ``"draft:int4"`` for the draft itself with quantised weights.
        policy: name of the policy that decides how much to draft and to verify; ``None`` for
            ``"sv"`` where there is a companion and ``"adaptive"`` where there is none.
        policy_options: further options of the policy.
        profile: file of ``draftwise profile``, what is known of acceptance for these models.
        latency_profile: file of ``draftwise profile-latency``, what passes cost on this machine;
            without it a policy that prices measures for a few seconds when it is loaded.
        num_speculative_tokens: most tokens drafted per step (γ), 0 … 64.
        lenience: divides the acceptance test's denominator, in (0, 1]. Below 1 more is accepted
            and the output is no longer the target's distribution. A mapping from a number of
            waiting requests to the lenience from there on makes it follow the load:
            ``{0: 1.0, 16: 0.8}``.
        verification: ``"block"`` decides over the whole draft (accepts more), ``"token"`` token
            by token. Both are lossless; lenience below 1 always uses ``"token"``.

    Raises:
        InvalidParameterError: a value lies outside its range.
    """

    draft: str
    companion: str | None = None
    policy: str | None = None
    policy_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    profile: str | None = None
    latency_profile: str | None = None
    num_speculative_tokens: int = 5
    lenience: float | Mapping[int, float] = field(default=1.0, hash=False)
    verification: VerificationMethod = "block"

    def __post_init__(self) -> None:
        _set(self, draft=path_name("draft", self.draft, "model"))
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
                "companion", f"{self.companion!r} is unknown; the draft quantised is {known}"
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
                raise InvalidParameterError("policy_options", f"names are strings, got {key!r}")
        options = {key: plain(value) for key, value in self.policy_options.items()}
        _set(self, policy_options=MappingProxyType(options))

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduced(self)

    @property
    def policy_name(self) -> str:
        """The policy, chosen by whether there is a companion if it was left open."""
        return self.policy or ("adaptive" if self.companion is None else "sv")

    @property
    def companion_quantization(self) -> str | None:
        """``"int8"`` for the companion ``"draft:int8"``, ``None`` for a model of its own."""
        if self.companion is None or not self.companion.startswith(_DRAFT_ITSELF):
            return None
        return self.companion.removeprefix(_DRAFT_ITSELF)

    def lenience_at(self, num_waiting: int) -> float:
        """The lenience while so many requests wait."""
        if not isinstance(self.lenience, Mapping):
            return self.lenience
        return self.lenience[max(start for start in self.lenience if start <= num_waiting)]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculationConfig:
        """Build from outside input, with vLLM's key names where the meaning is the same.

        ``model`` is taken for ``draft`` and ``method`` may be ``"draft_model"``. Unknown keys are
        refused by name.
        """
        values = dict(values)
        method = values.pop("method", "draft_model")
        if method != "draft_model":
            raise InvalidParameterError(
                "speculation.method", f"only 'draft_model' is known, got {method!r}"
            )
        for theirs, ours in _ALIASES.items():
            if theirs in values:
                if ours in values:
                    raise InvalidParameterError(
                        f"speculation.{theirs}", f"is another name of {ours!r}; give one of them"
                    )
                values[ours] = values.pop(theirs)
        refuse_unknown_keys("speculation", values, (item.name for item in fields(cls)))
        if "draft" not in values:
            raise InvalidParameterError("speculation.draft", "missing: name the draft model")
        return cls(**values)
