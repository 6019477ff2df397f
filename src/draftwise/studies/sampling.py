"""How tokens are sampled in a study that compares several settings."""

from __future__ import annotations

from dataclasses import dataclass

from draftwise.errors import InvalidParameterError
from draftwise.params import SamplingParams


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of all models.

    Attributes:
        temperature: 0 for greedy decoding.
        top_p: mass of the most likely tokens that are kept.
        top_k: number of the most likely tokens that are kept; 0 for all.

    Raises:
        InvalidParameterError: a value is out of range.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)

    @classmethod
    def parse(cls, text: str) -> Sampling:
        """Read ``TEMPERATURE[:TOP_P[:TOP_K]]``.

        Raises:
            InvalidParameterError: the text has another form, or a value is out of range.
        """
        parts = text.split(":")
        try:
            if len(parts) > 3:
                raise ValueError
            top_p = float(parts[1]) if len(parts) > 1 else 1.0
            top_k = int(parts[2]) if len(parts) > 2 else 0
            temperature = float(parts[0])
        except ValueError:
            raise InvalidParameterError(
                "samplings", f"{text!r} must have the form TEMPERATURE[:TOP_P[:TOP_K]]"
            ) from None
        return cls(temperature, top_p, top_k)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from the models' own distributions."""
        return self.temperature == 1 and self.top_p == 1 and not self.top_k

    @property
    def name(self) -> str:
        """As in tables: ``T=0.7, top-p 0.8, top-k 20``."""
        parts = [f"T={self.temperature:g}"]
        if self.top_p < 1:
            parts.append(f"top-p {self.top_p:g}")
        if self.top_k:
            parts.append(f"top-k {self.top_k}")
        return ", ".join(parts)

    @property
    def slug(self) -> str:
        """As the name of a file."""
        return f"t{self.temperature:g}-p{self.top_p:g}-k{self.top_k}"
