"""The configuration of a drafting head, whichever layout its folder has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from draftwise.errors import UnsupportedModelError

_ROLE = "draft"


class HeadKind(StrEnum):
    """What a head reads and predicts.

    Attributes:
        EAGLE: EAGLE-1 and EAGLE-2, which share one format. The head predicts the target's last
            hidden state, and the target's own projection turns it into logits.
        EAGLE3: EAGLE-3. The head reads states of several layers and has a projection of its own.
        DFLASH: DFlash. The head predicts all tokens of a block in one pass, independently.
        DSPARK: DSpark. The same with a Markov head, by which each token depends on the one before.
        DFLASH2: DFlash-2. DFlash with convolutions in the block and a selector, by which each token
            depends on the one before.
        PEAGLE: P-EAGLE. EAGLE-3 that predicts several tokens in one pass, independently.
    """

    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    DFLASH = "dflash"
    DSPARK = "dspark"
    DFLASH2 = "dflash2"
    PEAGLE = "peagle"

    @property
    def label(self) -> str:
        """The name for messages."""
        return _LABELS[self]

    @property
    def method(self) -> str:
        """What vLLM calls heads of this kind, as a method of speculation."""
        return {HeadKind.DFLASH2: "dflash", HeadKind.PEAGLE: "eagle3"}.get(self, str(self))


_LABELS = {
    HeadKind.EAGLE: "EAGLE-1 or EAGLE-2",
    HeadKind.EAGLE3: "EAGLE-3",
    HeadKind.DFLASH: "DFlash",
    HeadKind.DSPARK: "DSpark",
    HeadKind.DFLASH2: "DFlash-2",
    HeadKind.PEAGLE: "P-EAGLE",
}


class HeadLayout(StrEnum):
    """Who defined the layout of a head's folder.

    Attributes:
        SAFEAILAB: the authors of EAGLE. The configuration is flat.
        SPECULATORS: the library ``speculators``. The decoder layer has a configuration of its own.
        ZLAB: the authors of DFlash. The configuration has an object ``dflash_config``.
        DEEPSPEC: the authors of DSpark. The configuration is flat.
    """

    SAFEAILAB = "safeailab"
    SPECULATORS = "speculators"
    ZLAB = "z-lab"
    DEEPSPEC = "deepspec"


@dataclass(frozen=True, kw_only=True)
class DraftHeadConfig:
    """What heads of all kinds have.

    Hidden states of the target are numbered as in ``transformers``: state *a* is the input of layer
    *a*, ``hidden_states[a]``, and the number of layers stands for the output of the last layer,
    before the final norm. Ids of the other convention, in which *k* is the output of layer *k*, are
    converted to *k* + 1.

    Attributes:
        kind: what it reads and predicts.
        layout: the layout that it was written in.
        hidden_size: size of the head's residual stream and of the embedding.
        target_hidden_size: size of the target's residual stream.
        draft_vocab_size: number of tokens that it can propose.
        target_vocab_size: number of tokens that it reads, which is the target's vocabulary.
        num_layers: decoder layers, by the tensors where they are known.
        intermediate_size: size of the gate of the feed-forward block.
        num_heads, num_kv_heads, head_size: sizes of the attention.
        activation: activation of the gate, as named in the configuration.
        rms_norm_eps: added to the mean square in all norms.
        rope_parameters: ``rope_type``, ``rope_theta`` and parameters of the type.
        max_position_embeddings: context with which the rotary embedding was defined.
        windows: ``[num_layers]`` number of newest tokens that a layer attends to; ``None`` for all.
        logit_scale: factor of the logits.
    """

    kind: HeadKind
    layout: HeadLayout
    hidden_size: int
    target_hidden_size: int
    draft_vocab_size: int
    target_vocab_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    activation: str
    rms_norm_eps: float
    rope_parameters: Mapping[str, Any]
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    logit_scale: float

    def states_of(self, num_target_layers: int) -> tuple[int, ...]:
        """The states that it reads of a target.

        Args:
            num_target_layers: the target's number of layers.

        Raises:
            UnsupportedModelError: the target has no such layers.
        """
        raise NotImplementedError

    def check_target(self, hidden_size: int, vocab_size: int, num_layers: int) -> None:
        """Refuse a target that the head was not made for.

        Args:
            hidden_size: size of the target's residual stream.
            vocab_size: the target's number of tokens.
            num_layers: its number of layers.

        Raises:
            UnsupportedModelError: names the size that differs.
        """
        for what, own, targets in (
            ("a hidden size", self.target_hidden_size, hidden_size),
            ("a vocabulary", self.target_vocab_size, vocab_size),
        ):
            if own != targets:
                raise UnsupportedModelError(
                    _ROLE,
                    f"the head was made for a target with {what} of {own}, and the target has "
                    f"{targets}; choose a head of this target",
                )
        self.states_of(num_layers)


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DraftHeadConfig):
    """A head of EAGLE-1, EAGLE-2, EAGLE-3 or P-EAGLE, in terms that both layouts share.

    The sources are Li et al. 2024 (arXiv 2401.15077 and 2406.16858) and 2025 (arXiv 2503.01840),
    and for P-EAGLE arXiv 2602.01469. Of a head of EAGLE-1 or EAGLE-2, ``state_layers`` is ``None``,
    ``num_states`` is 1, and the vocabulary is the target's. Only the first layer reads the
    embedding and the state.

    Attributes:
        state_layers: the states of the target that the head reads, ascending; ``None`` for the
            default of EAGLE-3, see :meth:`states_of`.
        num_states: how many states it reads.
        norm_before_residual: whether the residual stream begins with the normalised state.
        norm_before_fc: whether the states are normalised together before they are projected.
        fc_norm: whether each state is normalised before they are projected.
        norm_output: whether the next token of a draft reads the head's output after the final norm.
        layernorms: whether a head that is not EAGLE-3 normalises the embedding, the input of its
            layer, and what the target's projection reads.
        fc_bias: whether its ``fc`` has a bias; ``None`` if the configuration does not say so.
        counted_layers: decoder layers by the configuration, which may be a copy of the target's;
            ``None`` where it says nothing of the head.
        mask_token_id: the token that stands for those to be predicted; ``None`` for a head that
            drafts token by token.
    """

    state_layers: tuple[int, ...] | None
    num_states: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    layernorms: bool = False
    fc_bias: bool | None = False
    counted_layers: int | None = None
    mask_token_id: int | None = None

    def states_of(self, num_target_layers: int) -> tuple[int, ...]:
        """The states that it reads of a target.

        They are (2, L // 2, L - 3) for EAGLE-3 by default, and L, the output of the last layer, for
        other heads.

        Args:
            num_target_layers: the target's number of layers L.

        Raises:
            UnsupportedModelError: the target has no such layers.
        """
        layers = self.state_layers
        if self.kind is HeadKind.EAGLE:
            layers = (num_target_layers,)
        elif layers is None:
            layers = (2, num_target_layers // 2, num_target_layers - 3)
        if not all(0 <= layer <= num_target_layers for layer in layers) or not ascend(layers):
            raise UnsupportedModelError(
                _ROLE,
                f"the head reads the hidden states {list(layers)}, and the target has "
                f"{num_target_layers} layers; set eagle_aux_hidden_state_layer_ids in config.json",
            )
        if len(layers) != self.num_states:
            raise UnsupportedModelError(
                _ROLE,
                f"the head reads {self.num_states} hidden states, and config.json has no "
                "eagle_aux_hidden_state_layer_ids that name them",
            )
        return layers

    def check_target(self, hidden_size: int, vocab_size: int, num_layers: int) -> None:
        """See :meth:`DraftHeadConfig.check_target`."""
        super().check_target(hidden_size, vocab_size, num_layers)
        if self.counted_layers not in (None, self.num_layers, num_layers):
            raise UnsupportedModelError(
                _ROLE,
                f"num_hidden_layers in config.json of the head is {self.counted_layers}, its "
                f"tensors are those of {self.num_layers}, and the target has {num_layers}; "
                "complete its weights, or correct the number",
            )


def ascend(layers: Sequence[int]) -> bool:
    """Whether layer ids are in ascending order, without repetitions."""
    return all(first < second for first, second in pairwise(layers))
