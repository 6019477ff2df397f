"""Messages between the engine and its replicas: a JSON header followed by tensor data.

Each replica has its own socket pair, which no other process can open.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwise import errors
from draftwise.core.random import StageUniforms, StepUniforms
from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.core.types import CompanionScores, Draft, DraftSignals
from draftwise.engine.parallel.replicas.messages import (
    Drafted,
    DraftShare,
    ModelSpec,
    Ready,
    ReplicaSpec,
    Scored,
    ScoreShare,
    TextChange,
)
from draftwise.errors import DraftwiseError

# The only classes that messages may contain.
_CLASSES = {
    each.__name__: each
    for each in (
        *(Drafted, DraftShare, ModelSpec, Ready, ReplicaSpec, Scored, ScoreShare, TextChange),
        *(CompanionScores, Draft, DraftSignals),
        *(LogitControls, TokenHistory, StageUniforms, StepUniforms),
    )
}
_HEADER_SIZE = struct.Struct("<Q")


class ChannelClosedError(Exception):
    """The process at the other end has ended or closed the connection."""


class Channel:
    """One end of a connection between the engine and a replica."""

    def __init__(self, connection: socket.socket) -> None:
        """Set up on a connected socket."""
        self._socket = connection

    def send(self, message: object) -> None:
        """Send a message.

        Args:
            message: an instance of a class in :mod:`.messages`, or a :class:`DraftwiseError`.

        Raises:
            ChannelClosedError: the other process has ended.
        """
        arrays: list[np.ndarray[Any, Any]] = []
        body = _encoded(message, arrays)
        kinds = [(array.dtype.str, array.shape) for array in arrays]
        header = json.dumps([kinds, body]).encode()
        try:
            self._socket.sendall(_HEADER_SIZE.pack(len(header)) + header)
            for array in arrays:
                if array.nbytes:
                    self._socket.sendall(np.ascontiguousarray(array).view(np.uint8).data)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            ChannelClosedError: the other process has ended.
        """
        start, header = bytearray(_HEADER_SIZE.size), bytearray()
        self._read(start)
        header.extend(bytes(_HEADER_SIZE.unpack(start)[0]))
        self._read(header)
        kinds, body = json.loads(header)
        arrays = []
        for dtype, shape in kinds:
            array = np.empty(shape, dtype=np.dtype(dtype))
            if array.nbytes:
                self._read(array.reshape(-1).view(np.uint8).data)
            arrays.append(array)
        return _decoded(body, arrays)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read(self, into: bytearray | memoryview) -> None:
        """Fill a buffer."""
        rest = memoryview(into)
        while rest:
            try:
                count = self._socket.recv_into(rest)
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not count:
                raise ChannelClosedError("it closed the connection")
            rest = rest[count:]


def _encoded(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    """Encode a value as JSON. Tensors and arrays are appended to ``arrays``."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        arrays.append(value.detach().cpu().numpy())
        return {"tensor": len(arrays) - 1}
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list):
        return [_encoded(each, arrays) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_encoded(each, arrays) for each in value]}
    if isinstance(value, Mapping):
        return {"map": [[key, _encoded(each, arrays)] for key, each in value.items()]}
    if isinstance(value, DraftwiseError):
        return {"error": [type(value).__name__, value.field, value.message]}
    name = type(value).__name__
    if _CLASSES.get(name) is not type(value) or not is_dataclass(value):
        raise TypeError(f"a message holds no {name}")
    known = {item.name: _encoded(getattr(value, item.name), arrays) for item in fields(value)}
    return {"class": name, "fields": known}


def _decoded(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    """The inverse of :func:`_encoded`."""
    if isinstance(value, list):
        return [_decoded(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.from_numpy(arrays[value["tensor"]])
    if "array" in value:
        return arrays[value["array"]]
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    if "tuple" in value:
        return tuple(_decoded(each, arrays) for each in value["tuple"])
    if "map" in value:
        return {key: _decoded(each, arrays) for key, each in value["map"]}
    if "error" in value:
        name, field, message = value["error"]
        return getattr(errors, name)(field, message)
    known = {name: _decoded(each, arrays) for name, each in value["fields"].items()}
    return _CLASSES[value["class"]](**known)
