"""Checkpoint file with the partial records of a long collection."""

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
    """Write the records of finished prompts, replacing the file atomically.

    Args:
        path: path of the checkpoint.
        collected: records by prompt index.
        provenance: origin of the records.

    Raises:
        InvalidParameterError: the file cannot be written.
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
    """Read the partial records of a collection; empty if there is no file.

    Raises:
        InvalidParameterError: the file is not a checkpoint, or it belongs to another collection.
    """
    if not path.exists():
        return {}
    remedy = f"delete {str(path)!r} to start again"
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != _KIND:
                raise ValueError("it is not a checkpoint")
            then: dict[str, str] = json.loads(metadata["provenance"])
            columns = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        prompts, lengths = columns.pop("prompts"), columns.pop("lengths")
        records = Records(**columns)
        if len(prompts) != len(lengths) or lengths.sum() != len(records):
            raise ValueError("the lengths of its columns differ")
        differing = {
            key: (then.get(key), provenance.get(key))
            for key in sorted(then.keys() | provenance.keys())
            if then.get(key) != provenance.get(key)
        }
    except _UNREADABLE as error:
        raise InvalidParameterError(
            "output", f"cannot resume from {str(path)!r} ({error}); {remedy}"
        ) from error
    if differing:
        changes = ", ".join(f"{key} ({old}, now {new})" for key, (old, new) in differing.items())
        raise InvalidParameterError(
            "output",
            f"{str(path)!r} is a checkpoint made with other settings: {changes}; use the same "
            f"settings, or {remedy}",
        )
    ends = np.cumsum(lengths)
    return {
        int(prompt): records.take(np.arange(end - length, end))
        for prompt, length, end in zip(prompts, lengths, ends, strict=True)
    }
