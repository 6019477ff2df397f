"""Speculation settings, set by the caller: per request and per engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from draftwise.core.formats import (
    HEAD_METHODS,
    MODEL_FREE_DRAFTS,
    MTP_METHOD,
    PROPOSALS,
    QUANTIZATIONS,
    VerificationMethod,
    draft_parts,
)
from draftwise.errors import InvalidParameterError
from draftwise.values import (
    boolean,
    decimal,
    integer,
    mapping,
    number,
    path_name,
    path_names,
    plain,
    reduced,
    refuse_deep,
    refuse_unknown_keys,
    set_fields,
    shown,
    text_name,
)
from draftwise.vllm_keys import translated

MAX_SPECULATIVE_TOKENS = 64
MAX_TREE_WIDTH = 8
# Positions in a corpus are stored in 32 bits.
MAX_CORPUS_TOKENS = 2**30
# The companion name "draft:int8" means the draft model with quantised weights.
_DRAFT_ITSELF = "draft:"
_DEFAULT_DRAFT = "suffix"


@dataclass(frozen=True)
class RequestSpeculation:
    """Speculation settings of one request, which override those of the engine.

    Attributes:
        enabled: False decodes the request with the target alone.
        policy: name of the policy, which gets its default options; ``None`` for the engine's
            policy.
        num_speculative_tokens: maximum number of tokens drafted per step, at most the engine's,
            which limits the request too if it is lowered later; ``None`` for the engine's.
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
            set_fields(
                self, num_speculative_tokens=_num_speculative_tokens(self.num_speculative_tokens)
            )
        if self.lenience is not None:
            set_fields(self, lenience=number("lenience", self.lenience, 0.0, 1.0, low_open=True))
        if self.draft is not None:
            set_fields(self, draft=path_name("draft", self.draft, "model"))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RequestSpeculation:
        """Build from external input; unknown keys raise :class:`InvalidParameterError`."""
        refuse_unknown_keys("speculation", values, (item.name for item in fields(cls)))
        return cls(**values)


@dataclass(frozen=True)
class SpeculationConfig:
    """Speculation settings of an engine.

    Paths may be given as :class:`pathlib.Path`; they are stored as strings.

    Attributes:
        draft: name of the draft model (a folder, a hub id or a zoo name such as ``"zoo:draft"``) or
            of a registered proposer that needs no model: ``"suffix"`` and ``"ngram"`` draft from
            the request's own text. ``None`` is ``"suffix"``. A list of ``"suffix"`` and a draft
            model uses both: the policy chooses between them for each request and step.
        corpus: texts that suffix drafts may continue, beside the request's own: a file of JSON
            lines or text, a folder of them, or a corpus that was saved. All requests use them.
        corpus_tokens: maximum number of tokens that are stored for ``"suffix"`` beside the
            requests' own texts. What was continued least recently is dropped first.
        remember_outputs: suffix drafts may continue earlier outputs of the same API key, and
            without a server those with the same ``cache_salt``.
        companion: model that scores drafted tokens before the target verifies them; ``draft:int8``
            and ``draft:int4`` are the quantised draft. Other names are a folder, a hub id or a zoo
            name.
        policy: decides how many tokens to draft and to verify; ``None`` for sv with a companion,
            adaptive without.
        policy_options: options of the policy.
        profile: acceptance profile of these models, written by ``draftwise profile``.
        latency_profile: latency profile of these models on this machine, written by ``draftwise
            profile-latency``; without it, latencies are measured for a few seconds at load time, if
            the policy or the guard needs them.
        num_speculative_tokens: maximum number of tokens drafted per step (γ), 0 to 64. In a token
            tree these are all its nodes, at most 63.
        tree_width: maximum number of alternatives for each drafted token, 1 to 8; with more than 1,
            drafts are token trees. ``"suffix"`` makes them from all matches, and a draft model or a
            head from its most likely tokens, or at temperatures above 0 from several that are
            drawn. With both, a continuation is a branch of the model's tree.
        lenience: factor on the denominator of the acceptance ratio, in (0, 1]. A value below 1
            accepts more tokens, and the output no longer has the target's distribution. A mapping
            such as ``{0: 1.0, 16: 0.8}`` makes it depend on the load: each key is a number of
            waiting requests from which its lenience applies.
        verification: ``block`` or ``token``; block verification accepts more, and both are
            lossless. Lenience below 1 always verifies token by token.
        guard: shorten drafts so that they cost at most one step, and one per cent of the time,
            compared with no speculation, under any policy. The first steps at a batch size then
            draft nothing, and a seed does not reproduce a text that a draft model drafts for, as
            draft lengths depend on measured times.
        proposals: what a head that drafts blocks proposes at temperatures above 0: its most likely
            tokens (``"one-hot"``), or tokens drawn from its distributions (``"sampled"``); ``None``
            for the first if the tokens of a block are independent of each other, and the second
            otherwise. Both are lossless.
        method: kind of head that the draft must be, ``"eagle"``, ``"eagle3"``, ``"dflash"`` or
            ``"dspark"``, as vLLM names it; ``None`` for any draft. Draftwise recognises heads by
            their files.

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
    tree_width: int = 1
    lenience: float | Mapping[int, float] = field(default=1.0, hash=False)
    verification: VerificationMethod = "block"
    corpus: str | Sequence[str] = ()
    corpus_tokens: int = 1_000_000
    remember_outputs: bool = False
    guard: bool = True
    proposals: str | None = None
    method: str | None = None

    def __post_init__(self) -> None:
        # MTP is refused when the target is known, with what its files say of it.
        methods = (None, *HEAD_METHODS, MTP_METHOD)
        if not isinstance(self.method, str | None) or self.method not in methods:
            known = " or ".join(map(repr, HEAD_METHODS))
            raise InvalidParameterError("method", f"must be {known}, got {shown(self.method)}")
        if self.draft is not None:
            given = path_names("draft", self.draft, "model")
            names = tuple(part for each in given for part in draft_parts(each))
            if not names:
                raise InvalidParameterError("draft", "must name at least one draft")
            set_fields(self, draft=names[0] if len(names) == 1 else names)
        if self.method in HEAD_METHODS and set(self.draft_names) <= {*MODEL_FREE_DRAFTS}:
            raise InvalidParameterError(
                "draft", f"must name a head, as the method is {self.method!r}"
            )
        set_fields(
            self,
            corpus=path_names("corpus", self.corpus, "file"),
            corpus_tokens=integer("corpus_tokens", self.corpus_tokens, 1, MAX_CORPUS_TOKENS),
            remember_outputs=boolean("remember_outputs", self.remember_outputs),
            guard=boolean("guard", self.guard),
        )
        if self.policy is not None:
            text_name("policy", self.policy, "policy")
        for name, kind in (
            ("companion", "model"),
            ("profile", "file"),
            ("latency_profile", "file"),
        ):
            if getattr(self, name) is not None:
                set_fields(self, **{name: path_name(name, getattr(self, name), kind)})
        if self.companion_quantization not in (None, *QUANTIZATIONS):
            known = " and ".join(f"'{_DRAFT_ITSELF}{each}'" for each in QUANTIZATIONS)
            raise InvalidParameterError(
                "companion", f"{self.companion!r} is unknown; a quantised draft is {known}"
            )
        set_fields(
            self,
            num_speculative_tokens=_num_speculative_tokens(self.num_speculative_tokens),
            tree_width=integer("tree_width", self.tree_width, 1, MAX_TREE_WIDTH),
            lenience=_lenience("lenience", self.lenience),
        )
        if self.tree_width > 1 and self.num_speculative_tokens == MAX_SPECULATIVE_TOKENS:
            raise InvalidParameterError(
                "num_speculative_tokens",
                f"must be at most {MAX_SPECULATIVE_TOKENS - 1} in token trees",
            )
        if not isinstance(self.verification, str) or self.verification not in ("block", "token"):
            raise InvalidParameterError(
                "verification", f"must be 'block' or 'token', got {shown(self.verification)}"
            )
        if not isinstance(self.proposals, str | None) or self.proposals not in (None, *PROPOSALS):
            raise InvalidParameterError(
                "proposals", f"must be 'one-hot' or 'sampled', got {shown(self.proposals)}"
            )
        mapping("policy_options", self.policy_options)
        refuse_deep("policy_options", self.policy_options)
        for key in self.policy_options:
            if not isinstance(key, str):
                raise InvalidParameterError("policy_options", f"keys must be strings, got {key!r}")
        options = {key: plain(value) for key, value in self.policy_options.items()}
        set_fields(self, policy_options=MappingProxyType(options))

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

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
    def of(cls, given: SpeculationConfig | Mapping[str, Any] | None) -> SpeculationConfig | None:
        """The settings that a caller gave, which may be a mapping; see :meth:`from_dict`.

        Raises:
            InvalidParameterError: they are invalid.
        """
        if isinstance(given, Mapping):
            return cls.from_dict(given)
        if given is not None and not isinstance(given, cls):
            raise InvalidParameterError(
                "speculation", f"must be a SpeculationConfig or a mapping, got {shown(given)}"
            )
        return given

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculationConfig:
        """Build from external input, which may use the keys of vLLM's ``--speculative-config``.

        ``model`` is an alias of ``draft``. ``method`` may be ``"draft_model"``, ``"eagle"``,
        ``"eagle3"``, ``"dflash"`` or ``"dspark"`` with a model, or ``"ngram"`` or ``"suffix"``,
        which draft without one. Other keys of vLLM are accepted with values that say what Draftwise
        does anyway. Unknown keys raise :class:`InvalidParameterError`.
        """
        values = translated(values)
        refuse_unknown_keys("speculation", values, (item.name for item in fields(cls)))
        return cls(**values)


def _lenience(name: str, value: object) -> float | Mapping[int, float]:
    """Validate a lenience, or a mapping from load to lenience (JSON gives its keys as strings)."""
    if not isinstance(value, Mapping):
        return number(name, value, 0.0, 1.0, low_open=True)
    rule: dict[int, float] = {}
    for key, each in value.items():
        field_name = f"{name}.{shown(key) if not isinstance(key, str) else key}"
        num_waiting = integer(field_name, decimal(key), 0)
        rule[num_waiting] = number(field_name, each, 0.0, 1.0, low_open=True)
    if 0 not in rule:
        raise InvalidParameterError(
            name, "a lenience by load needs an entry for 0 waiting requests"
        )
    return MappingProxyType(rule)


def _num_speculative_tokens(value: object) -> int:
    return integer("num_speculative_tokens", value, 0, MAX_SPECULATIVE_TOKENS)
