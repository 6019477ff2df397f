"""What a layer with a recurrent state keeps of a request."""

from __future__ import annotations

from dataclasses import dataclass

# Factors by which a state decays: one for each head, for each key, or for each number.
PER_HEAD, PER_KEY, PER_NUMBER = "head", "key", "number"


@dataclass(frozen=True)
class StateShape:
    """The state of a recurrence, ``[heads, keys, values]`` float32.

    Attributes:
        heads: number of heads.
        keys: size of a key.
        values: size of a value.
        decays: what a decay belongs to: ``PER_HEAD``, ``PER_KEY`` or ``PER_NUMBER``.
    """

    heads: int
    keys: int
    values: int
    decays: str = PER_HEAD

    @property
    def decay_size(self) -> int:
        """Decays of a head."""
        return {PER_HEAD: 1, PER_KEY: self.keys, PER_NUMBER: self.keys * self.values}[self.decays]

    @property
    def num_bytes(self) -> int:
        """Memory of a request's state."""
        return 4 * self.heads * self.keys * self.values

    @property
    def row_bytes(self) -> int:
        """Memory of what is kept of a token that may be rejected."""
        return 4 * self.heads * (self.decay_size + self.keys + self.values)


@dataclass(frozen=True)
class ConvolutionShape:
    """The newest inputs of a causal convolution.

    Attributes:
        channels: numbers of an input.
        width: inputs that an output depends on, its own included.
    """

    channels: int
    width: int


@dataclass(frozen=True)
class RecurrentShapes:
    """The states and convolutions of a model, in the order in which a pass computes them."""

    states: tuple[StateShape, ...] = ()
    convolutions: tuple[ConvolutionShape, ...] = ()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.states or self.convolutions)
