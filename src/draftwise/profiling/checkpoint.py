"""Records on their way: what a long collection has so far, in a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from draftwise.errors import InvalidParameterError
from draftwise.estimators.records import Records

_KIND = "draftwise records"
_UNREADABLE = SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError

Collected = dict[int, Records]


def save_checkpoint(path: Path, collected: Collected, provenance: Mapping[str, str]) -> None:
    """Write the records of finished prompts; what was there is replaced in one go.

    Args:
        path: the file.
        collected: records by number of the prompt.
        provenance: what they come from.

    Raises:
        InvalidParameterError: it cannot be written.
    """
    prompts = sorted(collected)
    columns: dict[str, NDArray[Any]] = {
        item.name: np.concatenate(
            [getattr(collected[prompt], item.name) for prompt in prompts]
            or [np.empty(0, dtype=np.float32)]
        )
        for item in fields(Records)
    }
    columns["prompts"] = np.array(prompts, dtype=np.int64)
    columns["lengths"] = np.array([len(collected[p]) for p in prompts], dtype=np.int64)
    new = path.with_name(path.name + ".new")
    try:
        save_file(columns, new, {"kind": _KIND, "provenance": json.dumps(dict(provenance))})
        os.replace(new, path)
    except (OSError, SafetensorError) as error:
        raise InvalidParameterError("output", f"cannot write {str(path)!r}: {error}") from error


def load_checkpoint(path: Path, provenance: Mapping[str, str]) -> Collected:
    """Read what a collection has so far: nothing if there is no file.

    Raises:
        InvalidParameterError: the file is no checkpoint, or one of another collection.
    """
    if not path.exists():
        return {}
    remedy = f"delete {str(path)!r} to begin anew"
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != _KIND:
                raise ValueError("it is another kind of file")
            then: dict[str, str] = json.loads(metadata["provenance"])
            columns = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        prompts, lengths = columns.pop("prompts"), columns.pop("lengths")
        records = Records(**columns)
        if len(prompts) != len(lengths) or lengths.sum() != len(records):
            raise ValueError("its parts do not fit together")
        differing = {
            key: (then.get(key), provenance.get(key))
            for key in sorted(then.keys() | provenance.keys())
            if then.get(key) != provenance.get(key)
        }
    except _UNREADABLE as error:
        raise InvalidParameterError(
            "output", f"{str(path)!r} holds no records to continue from ({error}); {remedy}"
        ) from error
    if differing:
        changes = ", ".join(f"{key} ({old}, now {new})" for key, (old, new) in differing.items())
        raise InvalidParameterError(
            "output",
            f"{str(path)!r} is half a profile made with other settings: {changes}; give the old "
            f"ones, or {remedy}",
        )
    ends = np.cumsum(lengths)
    return {
        int(prompt): records.take(np.arange(end - length, end))
        for prompt, length, end in zip(prompts, lengths, ends, strict=True)
    }
