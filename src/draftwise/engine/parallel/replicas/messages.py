"""The messages between the engine and its replicas, and the connections that carry them."""

from __future__ import annotations

import io
import pickle
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftwise.core.random import StepUniforms
from draftwise.core.sampling import LogitControls, TokenHistory
from draftwise.core.types import CompanionScores, Draft
from draftwise.models.loading import LoadedModel, load_model


@dataclass(frozen=True)
class ModelSpec:
    """How a draft or companion model was loaded.

    Attributes:
        name: folder, hub id or zoo name, with its quantisation.
        role: ``"draft"`` or ``"companion"``.
        dtype: data type of its weights.
        max_model_len: maximum context length, in tokens.
        trust_remote_code: whether code from the model's repository may run.
    """

    name: str
    role: str
    dtype: torch.dtype
    max_model_len: int
    trust_remote_code: bool

    @classmethod
    def of(cls, loaded: LoadedModel, role: str) -> ModelSpec:
        """How the engine has loaded its own draft or companion."""
        return cls(
            loaded.name,
            role,
            loaded.model.dtype,
            loaded.max_model_len,
            loaded.trust_remote_code,
        )

    def load(self, device: torch.device) -> LoadedModel:
        """Load the model on a device."""
        return load_model(
            self.name,
            self.role,
            self.dtype,
            device,
            self.max_model_len,
            self.trust_remote_code,
            may_be_shorter=True,
        )


@dataclass(frozen=True)
class ReplicaSpec:
    """The configuration of a replica, which answers with the fingerprints of its models.

    Attributes:
        draft: the draft model.
        companion: the companion model; ``None`` without a companion.
        device: device of both models.
        num_cache_slots: number of cache slots.
        vocab_size: the target's vocabulary size.
        num_threads: number of computing threads on a CPU.
    """

    draft: ModelSpec
    companion: ModelSpec | None
    device: str
    num_cache_slots: int
    vocab_size: int
    num_threads: int


@dataclass(frozen=True)
class TextChange:
    """How the text in a cache slot differs from the replica's copy.

    Attributes:
        cache_slot: the request's cache slot.
        is_new: whether the slot now belongs to another request.
        tail: the tokens that the text has gained.
        draft_length: number of valid tokens in the draft's cache.
        companion_length: number of valid tokens in the companion's cache.
    """

    cache_slot: int
    is_new: bool
    tail: list[int]
    draft_length: int
    companion_length: int


@dataclass(frozen=True)
class DraftShare:
    """A request to draft for some requests of a step.

    Attributes:
        texts: text changes of all these requests.
        chunks: cache slot, start and end of each prompt chunk.
        cache_slots: cache slots of the generating requests.
        limits: ``[requests]`` maximum draft lengths.
        controls, token_history, uniforms: ``[requests]``, as in
            :class:`~draftwise.engine.batch.Batch`.
        signals: whether the draft's signals are computed.
    """

    texts: list[TextChange]
    chunks: list[tuple[int, int, int]]
    cache_slots: list[int]
    limits: list[int]
    controls: LogitControls
    token_history: TokenHistory | None
    uniforms: StepUniforms | None
    signals: bool


@dataclass(frozen=True)
class Answer:
    """The answer to a :class:`DraftShare`, or to the number of draft tokens to score.

    Attributes:
        result: the draft, with requests in the order of the share; or the companion's scores, which
            are ``None`` if nothing was scored.
        cached: number of tokens in the model's cache, by cache slot.
    """

    result: Draft | CompanionScores | None
    cached: dict[int, int]


class ChannelClosedError(Exception):
    """The process at the other end has ended or closed the connection."""


class Channel:
    """One end of a connection between the engine and a replica.

    The connection is a socket pair, which no other process can open. A message is a pickle and the
    memory of its tensors.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Set up on a connected socket."""
        self._socket = connection

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            ChannelClosedError: the other process has ended.
        """
        head, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        _Pickler(head, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(message)
        parts = [head.getbuffer(), *(buffer.raw() for buffer in buffers)]
        sizes = [len(parts), *(part.nbytes for part in parts)]
        try:
            self._socket.sendall(struct.pack(f"<{len(sizes)}Q", *sizes))
            for part in parts:
                self._socket.sendall(part)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            ChannelClosedError: the other process has ended.
        """
        (count,) = struct.unpack("<Q", self._read(8))
        sizes = struct.unpack(f"<{count}Q", self._read(8 * count))
        head, *buffers = (self._read(size) for size in sizes)
        return pickle.loads(head, buffers=buffers)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        """The next ``size`` bytes."""
        content = bytearray(size)
        rest = memoryview(content)
        while rest:
            try:
                count = self._socket.recv_into(rest)
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not count:
                raise ChannelClosedError("it closed the connection")
            rest = rest[count:]
        return content


class _Pickler(pickle.Pickler):
    """Pickles tensors as arrays on the host, whose memory is sent apart and not copied."""

    def reducer_override(self, value: object) -> tuple[Callable[..., object], tuple[object]] | Any:
        """How a tensor is rebuilt; the default for every other object."""
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.detach().cpu().contiguous().numpy(),)
        return NotImplemented
