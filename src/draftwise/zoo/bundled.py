"""Names of the bundled models: ``zoo:target``, ``zoo:draft``, …, ``zoo:target@200m`` inflated.

Heads and exits belong to ``zoo:target``, so ``zoo:eagle3@200m`` is the head of ``zoo:target@200m``.
All other models have the target's tokenizer, which is stored once, in the target's folder.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from draftwise.errors import InvalidParameterError, ModelNotFoundError
from draftwise.zoo.inflation_plan import INFLATE_VERSION, parse_num_parameters

PREFIX = "zoo:"
CACHE_VARIABLE = "DRAFTWISE_CACHE"
TOKENIZER_FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
_WEIGHTS = Path(__file__).parent / "weights"
_TARGET = "target"


def names() -> list[str]:
    """Return the names of the bundled models, without the ``zoo:`` prefix."""
    if not _WEIGHTS.is_dir():
        return []
    return sorted(path.parent.name for path in _WEIGHTS.glob("*/config.json"))


def cache_folder() -> Path:
    """Cache folder for completed and inflated models, and for compiled kernels.

    This is ``$DRAFTWISE_CACHE``, by default ``~/.cache/draftwise``.
    """
    configured = os.environ.get(CACHE_VARIABLE)
    return Path(configured) if configured else Path.home() / ".cache" / "draftwise"


def resolve(name: str) -> Path:
    """Return the folder of the bundled model ``name``, with or without ``zoo:``.

    A model without a tokenizer of its own is completed with the target's in the cache folder.
    ``target@200m`` is the target inflated to about 200 million parameters. Both are made on first
    use.

    Raises:
        ModelNotFoundError: the name is unknown.
        InvalidParameterError: the model cannot have this size, or the cache cannot be written.
    """
    base, at, size = name.removeprefix(PREFIX).partition("@")
    known = names()
    if base not in known:
        nearest = difflib.get_close_matches(base, known, n=1)
        hint = f"did you mean {PREFIX}{nearest[0]}? " if nearest else ""
        listed = ", ".join(PREFIX + entry for entry in known) or "none, the weights are missing"
        raise ModelNotFoundError("model", f"{name!r} is not bundled; {hint}available: {listed}")
    source, target = _WEIGHTS / base, _WEIGHTS / _TARGET
    tokenizer = _missing_tokenizer(source, target)
    if not at:
        if not tokenizer:
            return source

        def complete(folder: Path) -> None:
            for path in [*source.iterdir(), *tokenizer]:
                shutil.copyfile(path, folder / path.name)

        files = [*source.iterdir(), *tokenizer]
        return _in_cache(f"{base}-{_fingerprint('bundled', files)}", complete)
    num_parameters = parse_num_parameters(size)

    def inflate_into(folder: Path) -> None:
        # This import loads torch, which names without a size do not need.
        from draftwise.zoo.inflate import inflate
        from draftwise.zoo.inflate_draft import inflate_draft

        if _is_model(source):
            inflate(source, folder, num_parameters)
            for path in tokenizer:
                shutil.copyfile(path, folder / path.name)
        else:
            inflate_draft(source, target, folder, num_parameters)

    # A head or an exit is inflated like the target, so the target's configuration counts as well.
    files = [*source.iterdir(), target / "config.json", *tokenizer]
    fingerprint = _fingerprint(f"inflate {INFLATE_VERSION}", files)
    return _in_cache(f"{base}-{num_parameters}-{fingerprint}", inflate_into)


def _is_model(folder: Path) -> bool:
    """Whether a folder contains a whole model, and not a head or an exit of the target."""
    return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))


def _missing_tokenizer(folder: Path, target: Path) -> list[Path]:
    """The files of the target's tokenizer that a folder needs to be a whole model."""
    if not _is_model(folder) or (folder / "tokenizer.json").exists():
        return []
    return [path for name in TOKENIZER_FILES if (path := target / name).exists()]


def _fingerprint(kind: str, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(kind.encode())
    for path in sorted(files):
        if path.is_file() and path.name != "README.md":
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _in_cache(name: str, write: Callable[[Path], None]) -> Path:
    """The folder of a model in the cache, written if it is not there.

    Raises:
        InvalidParameterError: the cache cannot be written.
    """
    folder = cache_folder() / "zoo"
    destination = folder / name
    if not destination.is_dir():
        try:
            _write_atomically(destination, write)
        except OSError as error:
            raise InvalidParameterError(
                "cache",
                f"cannot write the model to {str(folder)!r}: {error.strerror or error}; "
                "set DRAFTWISE_CACHE to another folder",
            ) from error
    return destination


def _write_atomically(destination: Path, write: Callable[[Path], None]) -> None:
    folder = destination.parent
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=folder))
    try:
        write(temporary)
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
