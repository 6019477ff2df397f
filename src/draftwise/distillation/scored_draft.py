"""The draft that a companion will score: its distributions along given texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.checkpoints.exits.files import names_exit
from draftwise.checkpoints.heads import HeadConfig, HeadWeights, read_head
from draftwise.checkpoints.mtp import drafts_with_mtp
from draftwise.checkpoints.support import context_length
from draftwise.core.formats import MODEL_FREE_DRAFTS
from draftwise.distillation.documents import Rows
from draftwise.distillation.eagle3 import chain_logits_of_head
from draftwise.distillation.evaluation import ChainLogits
from draftwise.distillation.start import check_head, continued_head, embedding_of
from draftwise.distillation.target import check_precision, read_config
from draftwise.distillation.tasks import along_text
from draftwise.distillation.teacher import Reading, Teacher, load_teacher
from draftwise.errors import InvalidParameterError, UnsupportedModelError, VocabularyMismatchError
from draftwise.models.heads.loading import find_named_head
from draftwise.models.loading import load_tokenizer
from draftwise.models.vocabulary_map import is_same_vocabulary

_ROLE = "draft"
# Size of a companion whose draft is no model: 1.5 times the default of ``draftwise train model``.
_DEFAULT_SIZE = (2, 192)
_HIDDEN_STEP = 64


def default_size(draft: str | None, trust_remote_code: bool = False) -> tuple[int, int]:
    """Number of layers and hidden size of a companion, from the draft that it will score.

    It has as many layers as a draft model, and 1.5 times its hidden size, rounded up to a multiple
    of 64. That makes 1.5 to 2.25 times its parameters.

    Args:
        draft: name of the draft; ``None`` if there is none.
        trust_remote_code: whether to run code that comes with the draft.

    Raises:
        DraftwiseError: the draft is not found, or is neither a model nor a head.
    """
    if draft is None or _find_head(draft) is not None:
        return _DEFAULT_SIZE
    config = read_config(draft, _ROLE, trust_remote_code)
    wanted = 3 * int(config.hidden_size) // 2
    return int(config.num_hidden_layers), -(-wanted // _HIDDEN_STEP) * _HIDDEN_STEP


@dataclass(frozen=True)
class LoadedDraft:
    """A loaded draft.

    Attributes:
        chain_logits: what it proposes along given texts.
        target_ids: ``[draft_vocab]`` the target's ids of the tokens that it can propose.
        num_parameters: its number of parameters.
    """

    chain_logits: ChainLogits
    target_ids: Tensor
    num_parameters: int


class FoundDraft(ABC):
    """A draft that was found and is not loaded."""

    @abstractmethod
    def check(self, config: Any) -> None:
        """Refuse the draft for the target with this configuration.

        Raises:
            DraftwiseError: it does not fit, or cannot be measured.
        """

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The target's states that the draft reads, for the target's number of layers."""
        return ()

    @abstractmethod
    def load(self, target: Teacher) -> LoadedDraft:
        """Load the draft for a target."""


def find_draft(name: str, target: str, length: int, trust_remote_code: bool = False) -> FoundDraft:
    """Find a draft model or an EAGLE-3 head.

    Args:
        name: a folder, a hub id or a zoo name.
        target: name of the target.
        length: tokens per row that the draft reads.
        trust_remote_code: whether to run code that comes with the draft or the target.

    Raises:
        DraftwiseError: the draft is not found, or is neither a model nor a head.
    """
    folder = _find_head(name)
    if folder is not None:
        config, weights = read_head(folder)
        if not isinstance(config, HeadConfig):
            raise InvalidParameterError(
                _ROLE, f"{name!r} is a head of {config.kind.label}, whose chains cannot be measured"
            )
        return _FoundHead(config, weights)
    return _FoundModel(name, target, length, trust_remote_code)


def _find_head(name: str) -> Path | None:
    """The folder of a head; ``None`` for a model.

    Raises:
        InvalidParameterError: the name is that of another kind of draft.
        UnsupportedModelError: the model is quantised.
        ModelNotFoundError: there is no such folder or hub model.
    """
    is_part = names_exit(name, _ROLE) or drafts_with_mtp(name)
    if is_part or name in MODEL_FREE_DRAFTS:
        raise InvalidParameterError(_ROLE, f"must be a model or an EAGLE-3 head, got {name!r}")
    check_precision(name, _ROLE)
    return find_named_head(name)


@dataclass(frozen=True)
class _FoundHead(FoundDraft):
    config: HeadConfig
    weights: HeadWeights

    def check(self, config: Any) -> None:
        try:
            check_head(self.config, self.weights, config)
        except UnsupportedModelError as error:
            raise InvalidParameterError(_ROLE, f"cannot be measured: {error.message}") from error

    def layers(self, num_layers: int) -> tuple[int, ...]:
        return self.config.states_of(num_layers)

    def load(self, target: Teacher) -> LoadedDraft:
        # The scale of the states is one of training. Without it the weights stay as they are.
        scale = torch.ones(self.config.num_states * self.config.target_hidden_size)
        head = continued_head(self.config, self.weights, scale).to(target.device)
        return LoadedDraft(
            partial(chain_logits_of_head, head, embedding_of(target, self.weights)),
            self.weights.target_ids,
            head.num_parameters,
        )


@dataclass(frozen=True)
class _FoundModel(FoundDraft):
    name: str
    target: str
    length: int
    trust_remote_code: bool

    def check(self, config: Any) -> None:
        own = read_config(self.name, _ROLE, self.trust_remote_code)
        try:
            context_length(own, _ROLE, self.length)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(_ROLE, f"cannot be measured: {error.message}") from error
        tokenizers = [
            load_tokenizer(each, role, self.trust_remote_code)
            for each, role in ((self.target, "target"), (self.name, _ROLE))
        ]
        is_same = (
            own.vocab_size == config.vocab_size
            if None in tokenizers
            else is_same_vocabulary(*tokenizers)
        )
        if not is_same:
            raise VocabularyMismatchError(
                _ROLE,
                f"{self.name!r} has other tokens than the target {self.target!r}, so it cannot be "
                "measured",
            )

    def load(self, target: Teacher) -> LoadedDraft:
        draft = load_teacher(
            self.name,
            self.layers,
            target.projection.dtype,
            target.device,
            self.trust_remote_code,
            _ROLE,
        )
        return LoadedDraft(
            partial(_chain_logits, draft, target.vocab_size),
            torch.arange(target.vocab_size),
            draft.num_parameters,
        )


def _chain_logits(
    draft: Teacher,
    vocab_size: int,
    rows: Rows,
    reading: Reading,
    begins: Tensor,
    num_steps: int,
) -> Iterator[Tensor]:
    """``[num_drafts, vocab]`` of each step, with the width of the target's vocabulary.

    A token that the draft's embedding does not contain is read as token 0.
    """
    known = rows.tokens < len(draft.embedding)
    final = draft.read(replace(rows, tokens=torch.where(known, rows.tokens, 0))).final
    for each in along_text(final, begins, num_steps):
        logits = draft.logits(each)[:, :vocab_size]
        missing = vocab_size - logits.shape[1]
        yield nn.functional.pad(logits, (0, missing), value=float("-inf"))
