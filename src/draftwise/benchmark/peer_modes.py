"""Configurations in which other engines run, with and without speculation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from draftwise.errors import InvalidParameterError
from draftwise.params import SamplingParams


@dataclass(frozen=True)
class PeerMode:
    """A configuration in which an engine runs.

    Attributes:
        label: suffix of the engine's name; empty for the engine's only or plain configuration.
        drafts: ``"none"`` for target-only decoding, ``"model"`` for drafts of a draft model,
            ``"head"`` for those of an EAGLE-3 head, and ``"text"`` for drafts that are looked up in
            the text of the request.
        settings: settings of the worker.
        takes_length: whether the benchmark chooses the draft length, so that there is one
            configuration per length.
        largest_batch: maximum batch size; ``None`` without a limit.
        temperature_first: whether top-p is applied to the probabilities at the temperature, as
            Draftwise does, and not to those at temperature 1.
    """

    label: str = ""
    drafts: Literal["none", "model", "head", "text"] = "none"
    settings: Mapping[str, Any] = field(default_factory=dict)
    takes_length: bool = False
    largest_batch: int | None = None
    temperature_first: bool = True

    def with_length(self, num_tokens: int) -> PeerMode:
        """Return this configuration with a draft length."""
        settings = {**self.settings, "num_speculative_tokens": num_tokens}
        return replace(self, label=f"{self.label} {num_tokens}", settings=settings)

    def refusal(self, batch_size: int, params: SamplingParams) -> str | None:
        """Reason why it cannot run, or would sample another distribution; ``None`` if it runs."""
        if self.largest_batch is not None and batch_size > self.largest_batch:
            return f"answers at most {self.largest_batch} prompt at once"
        changes_top_p = params.top_p < 1 and params.temperature not in (0, 1)
        if changes_top_p and not self.temperature_first:
            return "applies top_p before the temperature, which is another distribution"
        return None


_PLAIN = PeerMode()


def _draft(num_tokens: int) -> PeerMode:
    return PeerMode("draft", "model").with_length(num_tokens)


def _head(num_tokens: int) -> PeerMode:
    return PeerMode("eagle3", "head", {"method": "eagle3"}).with_length(num_tokens)


def _lookup(label: str, **limits: Any) -> PeerMode:
    return PeerMode(label, "text", {"method": "ngram"}, takes_length=True, **limits)


def _steered_lookup(draft: str) -> PeerMode:
    """Drafts from the text by Draftwise. vLLM's method is replaced, and sets the longest draft."""
    settings = {"method": "ngram", "steered": {"draft": draft}}
    return PeerMode(draft, "text", settings, takes_length=True)


@dataclass(frozen=True)
class PeerEngine:
    """Another engine.

    Attributes:
        module: module of ``peer_engines`` that runs it.
        modes: target-only decoding, and the engine's speculation with usual settings.
    """

    module: str
    modes: tuple[PeerMode, ...]


PEERS: dict[str, PeerEngine] = {
    "transformers": PeerEngine(
        "transformers_engine",
        (
            _PLAIN,
            PeerMode("assisted", "model", largest_batch=1),
            _lookup("prompt lookup", largest_batch=1),
        ),
    ),
    "vllm": PeerEngine(
        "vllm_engine",
        (
            _PLAIN,
            _draft(5),
            _head(5),
            _lookup("ngram"),
            # Chooses its draft lengths itself, up to the 24 tokens of vLLM's default.
            PeerMode("suffix", "text", {"method": "suffix"}),
        ),
    ),
    # Draftwise's vLLM integration, which must be installed in the environment of vLLM.
    "vllm-draftwise": PeerEngine(
        "vllm_engine",
        (
            PeerMode("", "model", {"num_speculative_tokens": 5, "steered": {}}),
            _steered_lookup("suffix"),
            _steered_lookup("ngram"),
        ),
    ),
    "openvino": PeerEngine(
        "openvino_engine",
        (
            _PLAIN,
            _draft(3),
            _draft(5),
            PeerMode("confidence", "model", {"confidence_threshold": 0.4}),
            _lookup("prompt lookup"),
        ),
    ),
    "llamacpp": PeerEngine(
        "llamacpp_engine",
        (
            _PLAIN,
            # Chooses its draft lengths itself, up to the 16 tokens of llama.cpp's default.
            PeerMode("draft", "model", largest_batch=1),
            _lookup("prompt lookup", largest_batch=1, temperature_first=False),
        ),
    ),
}


def peer_engine(name: str) -> PeerEngine:
    """Return an engine.

    Raises:
        InvalidParameterError: the engine is unknown.
    """
    if name not in PEERS:
        raise InvalidParameterError("peers", f"must be one of {', '.join(PEERS)}, got {name!r}")
    return PEERS[name]


def modes_of(
    name: str, has_draft: bool, lookup_lengths: Sequence[int], has_head: bool = False
) -> Iterator[PeerMode]:
    """Configurations of an engine in a benchmark.

    Args:
        name: name of the engine.
        has_draft: whether there is a draft model.
        lookup_lengths: draft lengths of drafts from the text; empty without such drafts.
        has_head: whether there is an EAGLE-3 head.

    Raises:
        InvalidParameterError: the engine is unknown, or has no configuration without a draft.
    """
    modes = peer_engine(name).modes
    sources = {"none": True, "model": has_draft, "head": has_head, "text": bool(lookup_lengths)}
    able = [mode for mode in modes if sources[mode.drafts]]
    if not able:
        raise InvalidParameterError(
            "peers", f"{name!r} requires a draft model that other engines can load"
        )
    for mode in able:
        yield from map(mode.with_length, lookup_lengths) if mode.takes_length else [mode]
