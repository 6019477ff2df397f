"""Settings of a training run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from draftwise.checkpoints.heads import public_name
from draftwise.checkpoints.heads.block_config import MAX_BLOCK_SIZE, MarkovKind
from draftwise.errors import InvalidParameterError
from draftwise.training.losses import LOSSES
from draftwise.training.schedule import Schedule
from draftwise.values import integer, number

# A run by time has no limit of its tokens.
_NO_LIMIT = 10**15
# (longest run in minutes, or in tokens; tokens per optimiser step)
_BATCH_TOKENS = ((15.0, 200_000, 512), (90.0, 2_000_000, 1024))
_LARGEST_BATCH_TOKENS = 2048
# Tokens per forward pass. A GPU is badly used by small passes.
_PASS_TOKENS, _PASS_TOKENS_ON_A_GPU = 2048, 16_384

_OF_BLOCKS = ("draft_vocab", "layers", "state_gib", "num_layers", "block_size", "num_anchors")
# What can be trained, and the settings that not all kinds have.
KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "eagle3": ("draft_vocab", "layers", "num_steps", "state_gib", "start_from"),
        "model": ("num_layers", "hidden_size"),
        "companion": ("num_layers", "hidden_size", "draft"),
        "exit": ("exit", "adapter_rank"),
        "mtp": ("num_steps", "state_gib", "start_from"),
        "dflash": _OF_BLOCKS,
        "dspark": (*_OF_BLOCKS, "markov", "markov_rank"),
    }
)
# Losses that heads that draft blocks have beside those of all kinds.
_OWN_LOSSES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"dflash": ("tokens", "dspark"), "dspark": ("tokens", "dspark")}
)
_MOST_BLOCK_LAYERS = 5
# A block predicts at least the tokens of the evaluation, and one row may predict nothing.
_SMALLEST_BLOCK = 6
# Settings that name a model, which may be a local folder.
_MODEL_NAMES = ("target", "start_from", "draft")


@dataclass(frozen=True)
class Machine:
    """Where a run computes.

    Attributes:
        dtype: data type of the target.
        device: device of the target and of what is trained.
        trust_remote_code: whether to run code that comes with the target.
        answers: folder of earlier answers; ``None`` for the user's cache folder.
    """

    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    answers: Path | None = None


@dataclass(frozen=True)
class TrainingSettings:
    """What a run trains, on what, and for how long.

    Some settings belong to some kinds only, see :data:`KINDS`. For other kinds they keep their
    defaults.

    Attributes:
        kind: a key of :data:`KINDS`.
        target: folder, hub id or zoo name of the target.
        prompts: files of prompts that the target answers.
        texts: files of texts, or folders of them.
        chat: whether the target's chat template formats the prompts; ``None`` where it has one.
        minutes: training time with the answers; ``None`` for a run by tokens.
        tokens: training tokens, repetitions included; ``None`` for a run by time.
        answer_share: largest share of ``minutes`` that answers take. In a run by tokens, the
            tokens of the answers relative to ``tokens``.
        temperatures: temperatures at which prompts are answered, in turns.
        max_tokens: largest number of tokens of an answer.
        length: tokens per training row, a prompt and its answer together.
        num_held_out: largest number of prompts that are not trained on. It is at most a tenth of
            them.
        draft_vocab: number of tokens that the head proposes.
        layers: hidden states that the head reads; ``None`` for the default of the target's depth.
        num_steps: tokens that a head or an MTP layer drafts in a row during training (training-time
            test).
        loss: name of a loss of :data:`draftwise.training.losses.LOSSES`; of heads that draft blocks
            one of :data:`draftwise.distillation.block_task.BLOCK_LOSSES`.
        learning_rate: peak learning rate of both optimisers.
        batch_tokens: tokens per optimiser step; ``None`` for the default of the run's length.
        state_gib: memory for the target's states, in GiB.
        seed: seed of all random numbers.
        start_from: folder of a head or an MTP layer to continue; ``None`` for a new one, or for the
            target's own MTP layer.
        num_layers: layers of a model, of a companion or of a head that drafts blocks.
        hidden_size: hidden size of a model or companion; a multiple of 64.
        draft: the draft that a companion will score; ``None`` if none is named.
        exit: number of the target's layers before an exit.
        adapter_rank: rank of the adapter of an exit.
        block_size: rows of a block; see
            :class:`draftwise.checkpoints.heads.block_config.BlockHeadConfig`.
        num_anchors: blocks of a training row, at random positions.
        markov: kind of a Markov head.
        markov_rank: rank of a Markov head.
    """

    kind: str
    target: str
    prompts: tuple[str, ...]
    texts: tuple[str, ...] = ()
    chat: bool | None = None
    minutes: float | None = None
    tokens: int | None = None
    answer_share: float = 0.3
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256
    length: int = 512
    num_held_out: int = 32
    draft_vocab: int = 8192
    layers: tuple[int, ...] | None = None
    num_steps: int = 4
    loss: str = "mixed"
    learning_rate: float = 3e-3
    batch_tokens: int | None = None
    state_gib: float = 2.0
    seed: int = 0
    start_from: str | None = None
    num_layers: int = 2
    hidden_size: int = 128
    draft: str | None = None
    exit: int | None = None
    adapter_rank: int = 64
    block_size: int = 8
    num_anchors: int = 128
    markov: str = MarkovKind.VANILLA.value
    markov_rank: int = 256

    def __post_init__(self) -> None:
        self._check_kind()
        if not self.prompts:
            raise InvalidParameterError("prompts", "name at least one file of prompts")
        if (self.minutes is None) == (self.tokens is None):
            raise InvalidParameterError("minutes", "give either minutes or tokens")
        if self.minutes is not None:
            number("minutes", self.minutes, 0.0, math.inf, low_open=True)
        if self.tokens is not None:
            integer("tokens", self.tokens, 1)
        if not self.temperatures:
            raise InvalidParameterError("temperatures", "name at least one temperature")
        for temperature in self.temperatures:
            number("temperatures", temperature, 0.0, 100.0)
        integer("max_tokens", self.max_tokens, 8)
        integer("length", self.length, self.max_tokens + 1)
        integer("num_held_out", self.num_held_out, 1)
        integer("draft_vocab", self.draft_vocab, 2)
        integer("num_steps", self.num_steps, 1, 16)
        number("learning_rate", self.learning_rate, 0.0, 1.0, low_open=True)
        number("state_gib", self.state_gib, 0.0, math.inf)
        number("answer_share", self.answer_share, 0.0, 1.0, low_open=True)
        integer("num_layers", self.num_layers, 1)
        if integer("hidden_size", self.hidden_size, 1) % 64:
            raise InvalidParameterError(
                "hidden_size", f"must be a multiple of 64, got {self.hidden_size}"
            )
        if self.exit is not None:
            integer("exit", self.exit, 1)
        integer("adapter_rank", self.adapter_rank, 1)
        integer("block_size", self.block_size, _SMALLEST_BLOCK, MAX_BLOCK_SIZE)
        integer("num_anchors", self.num_anchors, 1)
        integer("markov_rank", self.markov_rank, 1)
        if self.kind in _OWN_LOSSES:
            integer("num_layers", self.num_layers, 1, _MOST_BLOCK_LAYERS)
        if self.batch_tokens is not None:
            integer("batch_tokens", self.batch_tokens, 1)
        for name, known in (
            ("loss", (*LOSSES, *_OWN_LOSSES.get(self.kind, ()))),
            ("markov", tuple(map(str, MarkovKind))),
        ):
            if getattr(self, name) not in known:
                raise InvalidParameterError(
                    name, f"must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )

    def _check_kind(self) -> None:
        if self.kind not in KINDS:
            raise InvalidParameterError(
                "kind", f"must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        for item in fields(self):
            if item.name in self._foreign() and getattr(self, item.name) != item.default:
                raise InvalidParameterError(item.name, f"is not a setting of kind {self.kind!r}")
        if self.kind == "exit" and self.exit is None:
            raise InvalidParameterError("exit", "missing: name the number of layers of the exit")

    def _foreign(self) -> frozenset[str]:
        """Names of settings that belong to other kinds only."""
        return frozenset(name for names in KINDS.values() for name in names) - {*KINDS[self.kind]}

    def schedule(self, spent_seconds: float, device: str = "cpu") -> Schedule:
        """Schedule of the training.

        Args:
            spent_seconds: time that answering took.
            device: type of the device that trains.
        """
        minutes = self.minutes
        if minutes is not None:
            # At least half of the time trains, however long the answers took.
            minutes = max(minutes - spent_seconds / 60, minutes / 2)
        return Schedule(
            tokens=self.tokens or _NO_LIMIT,
            minutes=minutes,
            batch_tokens=self.batch_tokens or self._default_batch_tokens(),
            micro_batch_tokens=_PASS_TOKENS if device == "cpu" else _PASS_TOKENS_ON_A_GPU,
            length=self.length,
            muon_learning_rate=self.learning_rate,
            adamw_learning_rate=self.learning_rate / 4,
            weight_decay=0.05,
        )

    def _default_batch_tokens(self) -> int:
        """Small batches make the most of a short run, which has few steps."""
        for minutes, tokens, batch_tokens in _BATCH_TOKENS:
            if self.minutes is None:
                if (self.tokens or 0) <= tokens:
                    return batch_tokens
            elif self.minutes <= minutes:
                return batch_tokens
        return _LARGEST_BATCH_TOKENS

    def public(self) -> dict[str, Any]:
        """What the run was made from, with local files and folders by their last names only.

        Folders of drafts are shared, and paths tell what is not theirs to tell.
        """
        named = {
            name: public_name(getattr(self, name))
            for name in _MODEL_NAMES
            if getattr(self, name) is not None
        }
        return {
            **named,
            "prompts": [Path(name).name for name in self.prompts],
            "texts": [Path(name).name for name in self.texts],
        }

    def recorded(self) -> dict[str, Any]:
        """The settings of this kind for ``training.json``, with :meth:`public` names.

        A head that is trained further keeps its vocabulary and its layers.
        """
        left_out = set(self._foreign())
        if self.start_from is not None:
            left_out |= {"draft_vocab", "layers"}
        own = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {**own, **self.public()}

    def save(self, path: Path) -> None:
        """Write the settings as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def check_same(self, path: Path) -> None:
        """Compare with the settings of an unfinished run.

        Raises:
            InvalidParameterError: they differ, or cannot be read.
        """
        try:
            then: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidParameterError("resume", f"cannot read {str(path)!r}: {error}") from error
        now = json.loads(json.dumps(asdict(self)))
        for item in fields(self):
            if then.get(item.name) != now[item.name]:
                raise InvalidParameterError(
                    "resume",
                    f"the unfinished run has {item.name} = {then.get(item.name)!r}, and this one "
                    f"{now[item.name]!r}; use the same settings or another output folder",
                )
