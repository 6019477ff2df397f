"""Messages between the engine and its replicas, over gloo."""

from __future__ import annotations

import io
import pickle
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    ProcessGroupGloo,
    Store,
    TCPStore,
)

# Replicas wait as long as nobody asks for anything.
_FOREVER = timedelta(days=365)


def meeting_place(port: int, size: int) -> Any:
    """Where processes of this machine find each other.

    Args:
        port: of the place that is open; 0 to open one.
        size: how many will come.
    """
    return TCPStore("127.0.0.1", port, size, is_master=port == 0, wait_for_workers=False)


class _Pickler(pickle.Pickler):
    """Tensors go as arrays of the host, which is quick."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.cpu().numpy(),)
        return NotImplemented


class Group:
    """Processes that send each other messages: the engine is number 0."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Meet the others.

        Args:
            store: through which they find each other.
            rank: of this process.
            size: how many there are.
        """
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _FOREVER
        self._group: Any = ProcessGroupGloo(store, rank, size, options)

    def send(self, value: object, to: int) -> None:
        """Send anything that can be pickled.

        Raises:
            RuntimeError: the other process is gone.
        """
        written = io.BytesIO()
        _Pickler(written, protocol=5).dump(value)
        data = torch.frombuffer(written.getbuffer(), dtype=torch.uint8)
        self._group.send([torch.tensor([len(data)])], to, 0).wait()
        self._group.send([data], to, 0).wait()

    def receive(self, source: int) -> Any:
        """Wait for what another process sends.

        Raises:
            RuntimeError: the other process is gone.
        """
        size = torch.zeros(1, dtype=torch.long)
        self._group.recv([size], source, 0).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._group.recv([data], source, 0).wait()
        return pickle.loads(data.numpy().tobytes())
