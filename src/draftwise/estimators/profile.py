"""What is known of acceptance for one triple of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftwise.errors import InvalidParameterError


@dataclass(frozen=True)
class AcceptanceProfile:
    """What ``draftwise profile`` learnt.

    Attributes:
        provenance: what it was made from.
    """

    provenance: Mapping[str, str]

    @classmethod
    def load(cls, path: str) -> AcceptanceProfile:
        """Read a file.

        Raises:
            InvalidParameterError: it cannot be read.
        """
        if not Path(path).is_file():
            raise InvalidParameterError("profile", f"there is no file {path!r}")
        raise InvalidParameterError("profile", f"{path!r} is not an acceptance profile")
