"""The process of a replica: ``python -m draftwise.engine.replicas.process PORT RANK SIZE``."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

import torch

from draftwise.engine.follower import Follower
from draftwise.engine.replicas.link import Group, meeting_place
from draftwise.engine.replicas.replica import Replica
from draftwise.engine.replicas.share import DraftShare, JudgeShare
from draftwise.errors import DraftwiseError
from draftwise.models.loading import LoadedModel, load_model
from draftwise.processes import end_quickly, end_with_parent


@dataclass(frozen=True)
class ModelSpec:
    """How a small model was loaded.

    Attributes:
        name: folder, hub id or zoo name.
        role: ``"draft"`` or ``"companion"``.
        dtype: of its weights.
        max_model_len: longest context.
        trust_remote_code: whether code that comes with it is run.
        quantization: ``"int8"``, ``"int4"`` or ``None``.
    """

    name: str
    role: str
    dtype: torch.dtype
    max_model_len: int
    trust_remote_code: bool
    quantization: str | None

    def load(self, device: torch.device) -> LoadedModel:
        """Load it again."""
        return load_model(
            self.name,
            self.role,
            self.dtype,
            device,
            self.max_model_len,
            self.trust_remote_code,
            may_be_shorter=True,
            quantization=self.quantization,
        )


@dataclass(frozen=True)
class ReplicaSpec:
    """What a replica is made of.

    Attributes:
        draft: the draft model.
        companion: the companion, if there is one.
        device: where both go.
        num_rows: requests at once.
        vocab_size: the target's.
        num_threads: to compute with on a CPU.
    """

    draft: ModelSpec
    companion: ModelSpec | None
    device: str
    num_rows: int
    vocab_size: int
    num_threads: int


def serve(port: int, rank: int, size: int) -> None:
    """Load what the engine says, then do what it asks until it says nothing more."""
    group = Group(meeting_place(port, size), rank, size)
    spec: ReplicaSpec = group.receive(0)
    torch.set_num_threads(spec.num_threads)
    try:
        device = torch.device(spec.device)
        draft = spec.draft.load(device)
        companion = None if spec.companion is None else spec.companion.load(device)
        replica = Replica(
            _follower(draft, spec), None if companion is None else _follower(companion, spec)
        )
    except DraftwiseError as error:
        group.send(error, 0)
        return
    group.send([each.fingerprint for each in (draft, companion) if each is not None], 0)
    while True:
        asked = group.receive(0)
        if isinstance(asked, DraftShare):
            group.send(replica.draft(asked), 0)
        elif isinstance(asked, JudgeShare):
            group.send(replica.judge(asked), 0)
        else:
            return


def _follower(loaded: LoadedModel, spec: ReplicaSpec) -> Follower:
    model = loaded.model
    cache = model.new_cache(spec.num_rows, loaded.max_model_len)
    return Follower(model, cache, spec.vocab_size)


if __name__ == "__main__":
    # Ctrl-C reaches every process of a terminal; the engine decides when its replicas end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    end_quickly()
    serve(*(int(number) for number in sys.argv[1:4]))
