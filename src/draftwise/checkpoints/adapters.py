"""Adapters of PEFT, which are weights to be added to a model and no model of their own."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download

from draftwise.errors import UnsupportedModelError

_CONFIG = "adapter_config.json"


def refuse_adapter(folder: Path, name: str, role: str) -> None:
    """Refuse a folder with an adapter.

    It is refused beside a whole model too, since whether ``transformers`` adds the adapter to it
    depends on the packages that are installed.

    Args:
        folder: the folder.
        name: the user's name for it.
        role: the model's role; named in the error.

    Raises:
        UnsupportedModelError: there is an adapter. The error names its base model.
    """
    if not (folder / _CONFIG).is_file():
        return
    if (folder / "config.json").is_file():
        raise UnsupportedModelError(
            role,
            f"the folder {name!r} contains a model and an adapter (PEFT); remove {_CONFIG} to use "
            "the model without it, or merge it into the model with PeftModel.merge_and_unload, and "
            "save the result in a folder of its own",
        )
    raise _is_an_adapter(folder / _CONFIG, name, role)


def hub_adapter(name: str, role: str) -> UnsupportedModelError | None:
    """The error for a repository of the hub that contains an adapter only; ``None`` for others.

    Args:
        name: its hub id.
        role: the model's role; named in the error.
    """
    try:
        config = hf_hub_download(name, _CONFIG)
    except Exception:  # depends on the HTTP library that huggingface_hub uses
        return None
    return _is_an_adapter(Path(config), name, role)


def _is_an_adapter(config: Path, name: str, role: str) -> UnsupportedModelError:
    settings: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        settings = dict(json.loads(config.read_text(encoding="utf-8")))
    kind, base = settings.get("peft_type"), settings.get("base_model_name_or_path")
    of_what = f" of {base!r}" if isinstance(base, str) and base else ""
    what = f"a {kind} adapter" if isinstance(kind, str) else "an adapter"
    return UnsupportedModelError(
        role,
        f"{name!r} is {what}{of_what} (PEFT) and no model of its own; merge it into its base "
        "model with PeftModel.merge_and_unload, save the result and the tokenizer with "
        "save_pretrained, and name that folder",
    )
