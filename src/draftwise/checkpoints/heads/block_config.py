"""The configuration of a head that drafts a block of tokens in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from draftwise.checkpoints.heads.config import DraftHeadConfig
from draftwise.errors import UnsupportedModelError

_ROLE = "draft"
# A pass has at least this many new tokens of a request, so the rings of windows have room for it.
MAX_BLOCK_SIZE = 64


class MarkovKind(StrEnum):
    """How a Markov head computes the bias of the logits; see DSpark, section 3.

    Attributes:
        VANILLA: from the token before.
        GATED: the same, gated by the output of the layers.
        RNN: from a state of its own that follows the tokens of the draft.
    """

    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


@dataclass(frozen=True)
class MarkovConfig:
    """A Markov head.

    Attributes:
        kind: how it computes the bias.
        rank: size of the embedding of the token before.
    """

    kind: MarkovKind
    rank: int


@dataclass(frozen=True)
class ConvolutionConfig:
    """The convolutions of DFlash-2, in front of and behind attention and feed-forward block.

    Attributes:
        taps: rows of the block that each row is computed from: itself and those before.
        group_size: numbers of a row that share a coefficient.
    """

    taps: int
    group_size: int


@dataclass(frozen=True)
class SelectorConfig:
    """The selector of DFlash-2.

    Attributes:
        rank: size of the embeddings of a token and of the token before.
        num_candidates: the most likely tokens, among which it selects.
    """

    rank: int
    num_candidates: int


@dataclass(frozen=True, kw_only=True)
class BlockHeadConfig(DraftHeadConfig):
    """A head of DFlash, DFlash-2 or DSpark, in terms that all layouts share.

    Attributes:
        state_layers: the states of the target that the head reads, ascending.
        ids_key: key of ``config.json`` that names them, for messages.
        block_size: rows of a block: the newest token, and mask tokens.
        mask_token_id: the token that stands for those to be predicted.
        discards_anchor: whether the row of the newest token predicts nothing. Then row k predicts
            the k-th token after it, and otherwise the (k + 1)-th.
        is_causal: ``[num_layers]`` whether a row of the block attends to the rows up to itself
            only, and otherwise to all rows.
        windows_from_anchor: whether all rows attend to the same tokens before the block: as many as
            the window has. Otherwise the window of each row ends with the row itself.
        markov: the Markov head; ``None`` for none.
        has_confidence: whether there is a confidence head.
        confidence_reads_markov: whether it reads the embedding of the token before.
        confidence_temperatures: ``[num_drafted]`` by which the logit of the confidence in each
            token is divided; empty for 1.
        convolution: the convolutions; ``None`` for none.
        selector: the selector; ``None`` for none.
        embedding_scale: factor of the embedded rows.
        logit_softcap: the logits are limited to ±softcap by softcap·tanh(logit / softcap); ``None``
            for no limit.
    """

    state_layers: tuple[int, ...]
    ids_key: str
    block_size: int
    mask_token_id: int
    discards_anchor: bool
    is_causal: tuple[bool, ...]
    windows_from_anchor: bool
    markov: MarkovConfig | None
    has_confidence: bool
    confidence_reads_markov: bool
    convolution: ConvolutionConfig | None = None
    selector: SelectorConfig | None = None
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    confidence_temperatures: tuple[float, ...] = ()

    @property
    def num_drafted(self) -> int:
        """The number of tokens that a block predicts."""
        return self.block_size - self.discards_anchor

    def states_of(self, num_target_layers: int) -> tuple[int, ...]:
        """The states that it reads of a target, all before its last layer.

        What the last layer returns is another state in ``transformers``, where it is normalised,
        than where it is taken from the layer. A configuration does not tell which of them is meant.
        """
        if self.state_layers[-1] >= num_target_layers:
            raise UnsupportedModelError(
                _ROLE,
                f"{self.ids_key} in config.json of the head names the hidden states "
                f"{list(self.state_layers)}, and those before the last layer of the target are 0 "
                f"to {num_target_layers - 1}; choose a head of this target",
            )
        return self.state_layers
