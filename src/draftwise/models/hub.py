"""Models of the Hugging Face hub: whether it can be reached, and what is in the local cache.

``transformers`` asks the hub several times for every file and waits longer from time to time, half
a minute in all, before it says that there is no network. One question first is enough.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, get_session, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from draftwise import zoo
from draftwise.errors import ModelNotFoundError

# To connect and to answer; a hub that is slower counts as out of reach.
_PROBE_SECONDS = 5.0
_FIRST_SERVER_ERROR = 500


def find_on_hub(name: str, role: str) -> str:
    """Where ``transformers`` finds a model of the hub.

    The hub is asked once, with no second try. With ``HF_HUB_OFFLINE`` set it is not asked at all.

    Args:
        name: a hub id.
        role: of the model; named in errors.

    Returns:
        The id itself while the hub can be reached, otherwise the model's folder in the local cache.

    Raises:
        ModelNotFoundError: it is no hub id, or the hub cannot be reached and the model is not in
            the local cache.
    """
    try:
        cached = try_to_load_from_cache(name, constants.CONFIG_NAME)
    except HFValidationError as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(
            role, f"there is no folder {name!r}, and it is no hub id either: {reason}"
        ) from error
    obstacle = _obstacle()
    if obstacle is None:
        return name
    if not isinstance(cached, str):
        raise ModelNotFoundError(
            role,
            f"{name!r} is neither a folder nor in the local cache ({constants.HF_HUB_CACHE}), and "
            f"{obstacle}; name a folder, download the model where there is a network, or take a "
            f"bundled one: {', '.join(f'zoo:{known}' for known in zoo.names())}",
        )
    return str(Path(cached).parent)


def _obstacle() -> str | None:
    """Why nothing can be had of the hub; ``None`` if it answers."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE forbids asking the hub"
    try:
        response = get_session().head(constants.ENDPOINT, timeout=_PROBE_SECONDS)
    except Exception as error:  # of whichever HTTP library the hub's own uses
        reason = str(error).strip() or type(error).__name__
        return f"the hub at {constants.ENDPOINT} cannot be reached ({reason})"
    if response.status_code >= _FIRST_SERVER_ERROR:
        return f"the hub at {constants.ENDPOINT} answers with status {response.status_code}"
    return None
