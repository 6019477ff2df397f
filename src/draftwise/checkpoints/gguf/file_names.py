"""Names of GGUF files: a file, a folder, or a file of the hub by its name or its quantisation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from draftwise.checkpoints.hub import fetch_file, list_files
from draftwise.core.formats import QUANTIZATIONS
from draftwise.errors import ModelNotFoundError

_SUFFIX = ".gguf"
# `owner/repo:Q4_K_M` and `owner/repo:file.gguf`.
_TAGGED = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<tag>[\w./-]+)")
# `owner/repo/file.gguf`, where the file may be in a folder.
_IN_REPOSITORY = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)/(?P<file>[\w./-]+\.gguf)", re.I)
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.I)
# Files beside a model: encoders of images, statistics of a quantisation, and drafts. Models that
# contain an MTP layer have `MTP-` in their names.
_BESIDE = re.compile(r"(?i:mmproj|imatrix|(^|[-_.])(eagle3|dflash|dspark)-)|(^|[-_.])mtp-")
_MOST_NAMES = 8  # in an error


def is_gguf(name: str) -> bool:
    """Whether a model's name stands for a GGUF file. The hub is not asked."""
    path = Path(name).expanduser()
    if path.is_dir():
        return not (path / "config.json").exists() and bool(_models(_files_of(path)))
    return path.is_file() or name.lower().endswith(_SUFFIX) or _tagged(name) is not None


def find_gguf(name: str, role: str) -> list[Path]:
    """Find the GGUF file that a model's name stands for, and fetch it if it is on the hub.

    Args:
        name: a file, a folder with one model in GGUF, ``owner/repo/file.gguf``,
            ``owner/repo:file.gguf`` or ``owner/repo:Q4_K_M``.
        role: the model's role; named in errors.

    Returns:
        The file, or all parts of a model that is stored in several files, in order.

    Raises:
        ModelNotFoundError: there is no such file, a part is missing, or there are several models.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return [_existing(each, role) for each in _parts(path)]
    if path.is_dir():
        return [path / each for each in _parts_of(_only(_models(_files_of(path)), name, role))]
    found, tagged = _IN_REPOSITORY.fullmatch(name), _tagged(name)
    if found is not None:
        repository, wanted = found["repository"], found["file"]
    elif tagged is not None:
        repository, wanted = tagged
    else:
        raise ModelNotFoundError(role, f"there is no file {name!r}")
    files = list_files(repository, role)
    chosen = wanted if wanted in files else _by_tag(files, wanted, repository, role)
    return [fetch_file(repository, each, role) for each in _parts_of(chosen)]


def _tagged(name: str) -> tuple[str, str] | None:
    """Repository and tag of a name; ``None`` for other names."""
    found = _TAGGED.fullmatch(name)
    if found is None or found["tag"] in QUANTIZATIONS:
        return None
    return found["repository"], found["tag"]


def _files_of(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir() if each.is_file()]


def _models(files: Iterable[str]) -> list[str]:
    """The files that contain a model, with the first part only of one in several files."""
    models = []
    for file in sorted(files):
        part = _PART.fullmatch(file)
        is_first = part is None or int(part["number"]) == 1
        base = PurePosixPath(file).name
        if file.lower().endswith(_SUFFIX) and is_first and not _BESIDE.search(base):
            models.append(file)
    return models


def _only(models: Sequence[str], name: str, role: str) -> str:
    if len(models) > 1:
        raise ModelNotFoundError(
            role, f"the folder {name!r} has {len(models)} models; name one: {_shown(models)}"
        )
    return models[0]


def _by_tag(files: Iterable[str], tag: str, repository: str, role: str) -> str:
    """The file of a quantisation. Of several, the one with the shortest name."""
    models = _models(files)
    # A name such as `UD-Q4_K_M` contains a tag, too, and is longer.
    named = re.compile(re.escape(tag) + r"[.-]", re.I)
    matching = [each for each in models if named.search(PurePosixPath(each).name)]
    if not matching:
        reason = f"its models are {_shown(models)}" if models else "it has no GGUF files"
        raise ModelNotFoundError(role, f"{repository!r} has no file of {tag!r}; {reason}")
    return min(matching, key=lambda each: (len(each), each))


def _shown(models: Sequence[str]) -> str:
    more = len(models) - _MOST_NAMES
    return ", ".join(models[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _parts(path: Path) -> list[Path]:
    return [path.with_name(each) for each in _parts_of(path.name)]


def _parts_of(file: str) -> list[str]:
    """All files of the model that a file belongs to."""
    part = _PART.fullmatch(file)
    if part is None:
        return [file]
    count = int(part["count"])
    return [
        f"{part['stem']}-{number:05}-of-{count:05}{file[-len(_SUFFIX) :]}"
        for number in range(1, count + 1)
    ]


def _existing(path: Path, role: str) -> Path:
    if not path.is_file():
        raise ModelNotFoundError(role, f"a part of the model is missing: there is no {str(path)!r}")
    return path
