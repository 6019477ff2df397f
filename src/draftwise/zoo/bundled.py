"""Names of the bundled models: ``zoo:target``, ``zoo:draft``, …, ``zoo:target@200m`` inflated.

Heads and exits belong to ``zoo:target``, so ``zoo:eagle3@200m`` is the head of ``zoo:target@200m``.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from draftwise.errors import InvalidParameterError, ModelNotFoundError
from draftwise.zoo.sizes import INFLATE_VERSION, parse_num_parameters

PREFIX = "zoo:"
CACHE_VARIABLE = "DRAFTWISE_CACHE"
_WEIGHTS = Path(__file__).parent / "weights"
_TARGET = "target"


def names() -> list[str]:
    """Return the names of the bundled models, without the ``zoo:`` prefix."""
    if not _WEIGHTS.is_dir():
        return []
    return sorted(path.parent.name for path in _WEIGHTS.glob("*/config.json"))


def cache_folder() -> Path:
    """Cache folder for inflated models and compiled kernels.

    This is ``$DRAFTWISE_CACHE``, by default ``~/.cache/draftwise``.
    """
    configured = os.environ.get(CACHE_VARIABLE)
    return Path(configured) if configured else Path.home() / ".cache" / "draftwise"


def resolve(name: str) -> Path:
    """Return the folder of the bundled model ``name``, with or without ``zoo:``.

    ``target@200m`` is the target inflated to about 200 million parameters. It is built in the cache
    folder on first use. Raises :class:`ModelNotFoundError` for an unknown name and
    :class:`InvalidParameterError` for an unusable size.
    """
    base, at, size = name.removeprefix(PREFIX).partition("@")
    known = names()
    if base not in known:
        nearest = difflib.get_close_matches(base, known, n=1)
        hint = f"did you mean {PREFIX}{nearest[0]}? " if nearest else ""
        listed = ", ".join(PREFIX + entry for entry in known) or "none, the weights are missing"
        raise ModelNotFoundError("model", f"{name!r} is not bundled; {hint}available: {listed}")
    folder = _WEIGHTS / base
    return _inflated(folder, parse_num_parameters(size)) if at else folder


def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256(f"inflate {INFLATE_VERSION}".encode())
    # The configuration and the tokenizer are copied into the result, so they are hashed as well. A
    # head or an exit is inflated like the target.
    for path in sorted([*folder.iterdir(), _WEIGHTS / _TARGET / "config.json"]):
        if path.is_file() and path.name != "README.md":
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _inflated(source: Path, num_parameters: int) -> Path:
    """The folder of an inflated model, which is made if it is not in the cache.

    Raises:
        InvalidParameterError: the model cannot have this size, or the cache cannot be written.
    """
    folder = cache_folder() / "zoo"
    destination = folder / f"{source.name}-{num_parameters}-{_fingerprint(source)}"
    if not destination.is_dir():
        try:
            _write_inflated(source, num_parameters, destination)
        except OSError as error:
            raise InvalidParameterError(
                "cache",
                f"cannot write the inflated model to {str(folder)!r}: {error.strerror or error}; "
                "set DRAFTWISE_CACHE to another folder",
            ) from error
    return destination


def _write_inflated(source: Path, num_parameters: int, destination: Path) -> None:
    # This import loads torch, which names without a size do not need.
    from draftwise.zoo.inflate import inflate
    from draftwise.zoo.inflate_draft import inflate_draft, reads_target

    folder = destination.parent
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=folder))
    try:
        if reads_target(source):
            inflate_draft(source, _WEIGHTS / _TARGET, temporary, num_parameters)
        else:
            inflate(source, temporary, num_parameters)
        temporary.chmod(0o755)
        for path in temporary.iterdir():
            path.chmod(0o644)
        try:
            temporary.rename(destination)
        except OSError:
            # Another process finished the same model first; use its result.
            if not destination.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
