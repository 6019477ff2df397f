"""Models of the Hugging Face hub: a check that it can be reached, the local cache, and downloads.

Without a network, ``transformers`` retries every file for about half a minute before it reports an
error. A single request beforehand gives the same answer at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import (
    HfApi,
    constants,
    get_session,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from draftwise import zoo
from draftwise.errors import ModelNotFoundError

# Timeout to connect and to respond. A slower hub is treated as unreachable.
_PROBE_SECONDS = 5.0
_FIRST_SERVER_ERROR = 500
# Files of a repository that are downloaded. Other layouts of the same weights, and those in
# folders, are not.
_FILES = ["*config.json", "*.safetensors", "*.safetensors.index.json"]
_OTHER_FILES = ["*/*", "consolidated*"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def has_tokenizer(files: Iterable[str]) -> bool:
    """Whether a model's files contain a tokenizer.

    Args:
        files: names of the files.
    """
    return not set(_TOKENIZER_FILES).isdisjoint(files)


def cached_config(name: str) -> Path | None:
    """The configuration of a hub's repository in the local cache; ``None`` if it is not there."""
    try:
        cached = try_to_load_from_cache(name, constants.CONFIG_NAME)
    except HFValidationError:  # not a hub id
        return None
    return Path(cached) if isinstance(cached, str) else None


def find_on_hub(name: str, role: str) -> str:
    """Resolve a hub id to what ``transformers`` can load.

    One request is sent to the hub, without retries. With ``HF_HUB_OFFLINE`` set none is sent.

    Args:
        name: a hub id.
        role: the model's role; named in errors.

    Returns:
        The id itself if the hub can be reached, otherwise the model's folder in the local cache.

    Raises:
        ModelNotFoundError: the name is not a hub id, or the hub cannot be reached and the model is
            not in the local cache.
    """
    try:
        cached = try_to_load_from_cache(name, constants.CONFIG_NAME)
    except HFValidationError as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(
            role, f"{name!r} is neither a folder nor a hub id: {reason}"
        ) from error
    obstacle = _obstacle()
    if obstacle is None:
        return name
    if not isinstance(cached, str):
        raise ModelNotFoundError(
            role,
            f"{name!r} is neither a folder nor in the local cache ({constants.HF_HUB_CACHE}), and "
            f"{obstacle}; name a folder, download the model while connected, or use a "
            f"bundled one: {', '.join(f'zoo:{known}' for known in zoo.names())}",
        )
    return str(Path(cached).parent)


def list_files(repository: str, role: str) -> list[str]:
    """Names of the files of a repository, or of those in the local cache without a network.

    Args:
        repository: a hub id.
        role: the model's role; named in errors.

    Raises:
        ModelNotFoundError: there is no such repository, or the hub cannot be reached and nothing
            of it is in the local cache.
    """
    obstacle = _obstacle()
    try:
        if obstacle is None:
            return list(HfApi().list_repo_files(repository))
        folder = Path(snapshot_download(repository, local_files_only=True))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = obstacle or str(error).strip().splitlines()[0]
        raise ModelNotFoundError(
            role,
            f"{repository!r} is not in the local cache ({constants.HF_HUB_CACHE}), and {reason}",
        ) from error
    return [each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()]


def fetch_file(repository: str, file: str, role: str) -> Path:
    """A file of a repository, from the local cache or fetched into it.

    Args:
        repository: a hub id.
        file: name of the file within it.
        role: the model's role; named in errors.

    Raises:
        ModelNotFoundError: the file cannot be fetched.
    """
    cached = try_to_load_from_cache(repository, file)
    if isinstance(cached, str):
        return Path(cached)
    try:
        return Path(hf_hub_download(repository, file))
    except Exception as error:  # depends on the HTTP library that huggingface_hub uses
        reason = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(role, f"cannot fetch {file!r} of {repository!r}: {reason}") from (
            error
        )


def checkpoint_folder(
    name: str, role: str, revision: str | None = None, cache_folder: str | None = None
) -> Path:
    """The folder with the configuration and the safetensors files of a model.

    Args:
        name: a folder or a hub id. Files of the hub that are not in the local cache are downloaded.
        role: the model's role; named in errors.
        revision: revision in the hub; ``None`` for the default one.
        cache_folder: folder of downloaded models; ``None`` for that of huggingface_hub.

    Raises:
        ModelNotFoundError: there is no such folder or hub id, or it cannot be downloaded.
    """
    if Path(name).is_dir():
        return Path(name)
    try:
        snapshot = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_folder,
            allow_patterns=_FILES,
            ignore_patterns=_OTHER_FILES,
        )
    except HFValidationError:
        reason = "is neither a folder nor a hub id"
    except (HfHubHTTPError, OSError) as error:
        reason = f"is neither a folder nor can it be downloaded: {' '.join(str(error).split())}"
    else:
        return Path(snapshot)
    raise ModelNotFoundError(role, f"{name!r} {reason}")


def _obstacle() -> str | None:
    """The reason why the hub cannot be used; ``None`` if it responds."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so the hub is not used"
    try:
        response = get_session().head(constants.ENDPOINT, timeout=_PROBE_SECONDS)
    except Exception as error:  # depends on the HTTP library that huggingface_hub uses
        reason = str(error).strip() or type(error).__name__
        return f"the hub at {constants.ENDPOINT} cannot be reached ({reason})"
    if response.status_code >= _FIRST_SERVER_ERROR:
        return f"the hub at {constants.ENDPOINT} responds with status {response.status_code}"
    return None
