"""What a GGUF file says about the rotary embedding, as a configuration's ``rope_parameters``.

llama.cpp divides the frequencies of a head by the numbers of a tensor, if there is one, and by a
factor. YaRN divides the low ones only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from draftwise.checkpoints.gguf.metadata import Metadata

# Divide the frequencies; one number for each rotated pair.
FREQUENCIES = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
ROTARY_TENSORS = frozenset({FREQUENCIES, LONG, SHORT})
# A divisor from which on a pair is not rotated at any position.
UNROTATED = 1e29
_TYPES = ("none", "linear", "yarn", "longrope")


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding.

    Attributes:
        base: of the frequencies: pair i of n turns by base^(-i/n) per position.
        divisors: of the frequencies, one for each pair; ``None`` for none.
        factor: divisor of all frequencies; of the low ones with YaRN.
        attention: factor of the cosines and sines, beside the one of YaRN.
        is_yarn: whether low frequencies are interpolated and high ones kept (Peng et al. 2023).
        betas: with YaRN, turns within the original context above which a frequency is kept, and
            turns below which it is divided.
        original: context length before it was extended.
    """

    base: float
    divisors: tuple[float, ...] | None = None
    factor: float = 1.0
    attention: float = 1.0
    is_yarn: bool = False
    betas: tuple[float, float] = (32.0, 1.0)
    original: int = 0

    def unscaled(self, base: float) -> Rotary:
        """The same with another base and without a factor: that of sliding layers."""
        return replace(self, base=base, factor=1.0)

    def parameters(self) -> dict[str, Any]:
        """The same as ``rope_parameters``.

        The names ``default``, ``linear`` and ``yarn`` are used where they suffice. Everything else
        is ``longrope`` with the same numbers for short and long texts, which does not depend on the
        length of a text.
        """
        theta = {"rope_theta": self.base}
        if self.is_yarn and self.factor != 1:
            fast, slow = self.betas
            return {
                "rope_type": "yarn",
                **theta,
                "factor": self.factor,
                "original_max_position_embeddings": self.original,
                "attention_factor": self.attention * mscale(self.factor),
                "beta_fast": fast,
                "beta_slow": slow,
                "truncate": True,
            }
        if self.divisors is None and self.attention == 1:
            if self.factor == 1:
                return {"rope_type": "default", **theta}
            return {"rope_type": "linear", **theta, "factor": self.factor}
        assert self.divisors is not None
        divisors = [each * self.factor for each in self.divisors]
        return {
            "rope_type": "longrope",
            **theta,
            "long_factor": divisors,
            "short_factor": divisors,
            "original_max_position_embeddings": self.original,
            "attention_factor": self.attention,
        }


def mscale(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's factor of cosines and sines for a context that is ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def read_rotary(metadata: Metadata, num_pairs: int, length: int, tensors: frozenset[str]) -> Rotary:
    """Read the rotary embedding of the layers that are not special.

    Args:
        metadata: the file's keys.
        num_pairs: rotated pairs of a head.
        length: longest context that will be served. It decides between the two tensors of longrope,
            once for all texts.
        tensors: names of the tensors that the architecture uses, if the file has them.

    Raises:
        UnsupportedModelError: a value or a tensor is not supported.
    """
    kind = metadata.value("rope.scaling.type", "linear")
    if kind not in _TYPES:
        raise metadata.refuse("rope.scaling.type", f"it must be one of {', '.join(_TYPES)}")
    old, new = "rope.scale_linear", "rope.scaling.factor"
    older = metadata.number(old, 0.0)
    factor = metadata.number(new, older) or 1.0
    if factor < 0:
        raise metadata.refuse(new if metadata.has(new) else old, "it must not be negative")
    original = metadata.count(
        "rope.scaling.original_context_length", metadata.count("context_length")
    )
    attention = metadata.number("rope.scaling.attn_factor", 1.0)
    divisors = _divisors(metadata, _used(kind, tensors), num_pairs, length > original)
    if divisors is not None and kind == "yarn":
        raise metadata.refuse("rope.scaling.type", "YaRN is not supported with a tensor of factors")
    if divisors is None and attention != 1:
        divisors = (1.0,) * num_pairs
    return Rotary(
        metadata.number("rope.freq_base", 10000.0),
        divisors,
        1.0 if kind == "none" else factor,
        attention,
        kind == "yarn",
        original=original,
    )


def _used(kind: str, tensors: frozenset[str]) -> frozenset[str]:
    """The tensors of an architecture that a type of scaling uses."""
    if FREQUENCIES not in tensors:  # Phi 3 uses the factors with any type
        return tensors
    return tensors & ({LONG, SHORT} if kind == "longrope" else {FREQUENCIES})


def _divisors(
    metadata: Metadata, used: frozenset[str], num_pairs: int, is_long: bool
) -> tuple[float, ...] | None:
    """The numbers of the tensor that divides the frequencies; ``None`` if there is none."""
    file = metadata.file
    present = ROTARY_TENSORS & file.tensors.keys()
    for name in sorted(present - used):
        raise file.error(f"has the tensor {name!r}, which its rotary embedding does not use")
    if not present:
        return None
    for name in sorted(used - present):
        raise file.error(f"has no tensor {name!r}, which its rotary embedding needs")
    name = FREQUENCIES if FREQUENCIES in used else LONG if is_long else SHORT
    if file.tensors[name] != (num_pairs,):
        shape = list(file.tensors[name])
        raise file.error(f"has the tensor {name!r} of shape {shape}, and {num_pairs} are rotated")
    return tuple(file.read(name).tolist())
