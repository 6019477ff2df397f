"""The keys that a GGUF file has for its architecture, and which of them were used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from draftwise.checkpoints.gguf.file import GgufFile
from draftwise.errors import UnsupportedModelError

# Characters of a value that an error shows.
_SHOWN = 60


class Metadata:
    """The keys under ``<architecture>.``, without this prefix.

    Every key that is asked for counts as used. :meth:`check_all_used` refuses the others.

    Attributes:
        file: the file.
        architecture: its architecture.
    """

    def __init__(self, file: GgufFile) -> None:
        """Wrap the keys of a file."""
        self.file = file
        self.architecture = file.architecture
        self._used: set[str] = set()

    @property
    def num_mtp_layers(self) -> int:
        """Number of layers for drafting, which are the last of all blocks.

        Raises:
            UnsupportedModelError: it is not a number below that of all blocks.
        """
        name = "nextn_predict_layers"
        found = self.value(name, 0)
        if type(found) is not int or not 0 <= found < self.count("block_count"):
            raise self.refuse(name, "it must be a number below that of all blocks")
        return found

    @property
    def num_layers(self) -> int:
        """Number of layers of the model itself."""
        return self.count("block_count") - self.num_mtp_layers

    def by_layer(self, name: str, default: Any = None) -> Any:
        """A value as :meth:`value` returns it; of an array, the entries of the model's layers."""
        found = self.value(name, default)
        return found[: self.num_layers] if isinstance(found, list) else found

    def has(self, name: str) -> bool:
        """Whether the file has a key. This does not count as a use."""
        return f"{self.architecture}.{name}" in self.file.keys

    def number(self, name: str, default: float | None = None) -> float:
        """A number.

        Args:
            name: the key.
            default: its value if the file has none; ``None`` if it must have one.

        Raises:
            UnsupportedModelError: the key is missing, or its value is not a number.
        """
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, "it must be a number")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer, or an array of one such integer for every layer.

        Args:
            name: the key.
            default: its value if the file has none; ``None`` if it must have one.

        Raises:
            UnsupportedModelError: the key is missing, its value is not a positive integer, or it
                differs between layers.
        """
        value = self._value(name, default)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise self.refuse(name, "layers that differ in it are not supported")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.refuse(name, "it must be a positive integer")
        return value

    def counts(self, name: str) -> list[int]:
        """A non-negative integer for every layer, from an array or one integer for all.

        Args:
            name: the key.

        Raises:
            UnsupportedModelError: the key is missing, or its value is something else.
        """
        num_layers = self.num_layers
        value = self.by_layer(name)
        counts = value if isinstance(value, list) else [value] * num_layers
        if len(counts) != num_layers or not all(type(each) is int and each >= 0 for each in counts):
            raise self.refuse(name, f"it must be an integer, or {num_layers} of them")
        return counts

    def flag(self, name: str, default: bool) -> bool:
        """A boolean.

        Args:
            name: the key.
            default: its value if the file has none.

        Raises:
            UnsupportedModelError: its value is not a boolean.
        """
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "it must be true or false")
        return value

    def value(self, name: str, default: Any = None) -> Any:
        """A value of any type; ``default`` if the file has none."""
        self._used.add(name)
        return self.file.value(f"{self.architecture}.{name}", default)

    def require(self, name: str, *allowed: Any, because: str) -> None:
        """Refuse the file if it has a key with another value.

        Args:
            name: the key.
            allowed: values that are supported.
            because: why no others are, as a clause.

        Raises:
            UnsupportedModelError: the key has another value.
        """
        if self.has(name) and self.value(name) not in allowed:
            raise self.refuse(name, because)

    def ignore(self, names: Iterable[str]) -> None:
        """Count keys as used that have no effect on the model."""
        self._used.update(names)

    def ignore_values(self, values: Mapping[str, Any]) -> None:
        """Count keys as used that have a value without effect.

        Args:
            values: that value, by key.
        """
        self.ignore(name for name, value in values.items() if self._given(name) == value)

    def refuse(self, name: str, because: str) -> UnsupportedModelError:
        """The error for a key whose value is not supported.

        Args:
            name: the key.
            because: the reason, as a clause.
        """
        key = f"{self.architecture}.{name}"
        value = self.file.value(key)
        if value is None:
            return self.file.error(f"has no key {key!r}: {because}")
        shown = repr(value)
        if len(shown) > _SHOWN:
            shown = f"{shown[:_SHOWN]}…"
        return self.file.error(f"has {key!r} = {shown}: {because}")

    def check_all_used(self) -> None:
        """Refuse the file if it has a key that was not used.

        Raises:
            UnsupportedModelError: names the key.
        """
        prefix = f"{self.architecture}."
        names = {key.removeprefix(prefix) for key in self.file.keys if key.startswith(prefix)}
        for name in sorted(names - self._used):
            raise self.refuse(name, "this key is not known, so the model would be computed wrongly")

    def _given(self, name: str) -> Any:
        return self.file.value(f"{self.architecture}.{name}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.value(name, default)
        if value is None:
            raise self.refuse(name, "it is needed")
        return value
