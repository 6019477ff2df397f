"""The process of a replica: ``python -m draftwise.engine.parallel.replicas.process DESCRIPTOR``.

``DESCRIPTOR`` is the file descriptor of the inherited socket that is connected to the engine.
"""

from __future__ import annotations

import signal
import socket
import sys

import torch

from draftwise.engine.cached_model import CachedModel
from draftwise.engine.parallel.replicas.channel import Channel, ChannelClosedError
from draftwise.engine.parallel.replicas.messages import (
    DraftShare,
    Ready,
    ReplicaSpec,
    ScoreShare,
)
from draftwise.engine.parallel.replicas.replica import Replica
from draftwise.errors import DraftwiseError
from draftwise.models.loading import LoadedModel
from draftwise.processes import end_quickly, end_with_parent


def serve(channel: Channel) -> None:
    """Load the models that the engine names. Then draft and score until it closes the channel."""
    spec: ReplicaSpec = channel.receive()
    torch.set_num_threads(spec.num_threads)
    try:
        device = torch.device(spec.device)
        draft = spec.draft.load(device)
        companion = None if spec.companion is None else spec.companion.load(device)
        replica = Replica(
            _cached_model(draft, spec),
            None if companion is None else _cached_model(companion, spec),
        )
    except DraftwiseError as error:
        channel.send(error)
        return
    channel.send(Ready([each.fingerprint for each in (draft, companion) if each is not None]))
    while True:
        message = channel.receive()
        if isinstance(message, DraftShare):
            channel.send(replica.draft(message))
        elif isinstance(message, ScoreShare):
            channel.send(replica.score(message))


def _cached_model(loaded: LoadedModel, spec: ReplicaSpec) -> CachedModel:
    model = loaded.model
    cache = model.new_cache(spec.num_cache_slots, loaded.max_model_len)
    return CachedModel(model, cache, spec.vocab_size)


if __name__ == "__main__":
    # Ctrl-C reaches every process of a terminal, but the engine decides when its replicas end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    end_quickly()
    try:
        serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
    except ChannelClosedError:
        sys.exit(0)
