"""A head that drafts blocks as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from draftwise.checkpoints.heads.block_config import BlockHeadConfig, MarkovKind
from draftwise.models.decoder_spec import (
    Activation,
    DecoderSpec,
    LayerSpec,
    NormSpec,
    RotaryTable,
    StateInputSpec,
)
from draftwise.models.heads.spec import ROTARY, HeadParts, embedding_of, head_rotary, head_sizes
from draftwise.models.layer_shape import LayerShape


class BlockView(NamedTuple):
    """The keys that the rows of a block attend to in one layer.

    Attributes:
        window: number of newest tokens; ``None`` for all.
        from_anchor: whether the window has the tokens before the block, the same for all rows.
            Otherwise that of each row ends with the row itself.
        is_causal: whether a row attends to the rows of the block up to itself only.
    """

    window: int | None
    from_anchor: bool
    is_causal: bool

    def first(self, anchor: int) -> int:
        """The first position that any row of a block attends to.

        Args:
            anchor: position of the first row.
        """
        if self.window is None:
            return 0
        return max(0, anchor - self.window + (not self.from_anchor))

    def hidden(self, anchor: int, size: int, device: torch.device) -> Tensor:
        """``[size, keys]`` whether each row does not attend to each key from the first one on.

        Args:
            anchor: position of the first row.
            size: number of rows.
            device: device of the result.
        """
        keys = torch.arange(self.first(anchor), anchor + size, device=device)
        rows = torch.arange(anchor, anchor + size, device=device).unsqueeze(1)
        hidden = torch.zeros(size, len(keys), dtype=torch.bool, device=device)
        if self.is_causal:
            hidden |= keys > rows
        if self.window is not None and not self.from_anchor:
            hidden |= (rows - keys >= self.window) | (keys - rows >= self.window)
        return hidden

    @property
    def kept(self) -> int | None:
        """The window that a cache keeps for the next block; ``None`` for all tokens."""
        return None if self.window is None else self.window + self.from_anchor


@dataclass(frozen=True)
class MarkovSpec:
    """A Markov head; see :class:`draftwise.models.heads.markov.MarkovHead`.

    Attributes:
        kind: how it computes the bias.
        embedding: ``[target_vocab, rank]`` W1.
        projection: W2, from the rank to the draft's vocabulary.
        joint: the linear layer of the gate or of the state; ``None`` for the vanilla head.
    """

    kind: MarkovKind
    embedding: Tensor
    projection: nn.Linear
    joint: nn.Linear | None


@dataclass(frozen=True)
class ConvolutionSpec:
    """See :class:`draftwise.models.heads.block_conv.BlockConvolution`.

    Attributes:
        base: ``[2, taps, hidden]`` coefficients of the side in front and of that behind.
        projection: the linear layer to the deviations of both sides.
        group_size: numbers of a row that share a deviation.
    """

    base: Tensor
    projection: nn.Linear
    group_size: int


@dataclass(frozen=True)
class SelectorSpec:
    """See :class:`draftwise.models.heads.selector.CandidateSelector`.

    Attributes:
        predecessor: ``[vocab, rank]`` embedding of the token before.
        successor: ``[vocab, rank]`` embedding of a candidate.
        projection: the linear layer from the output of the layers to the rank.
        num_candidates: number of candidates.
    """

    predecessor: Tensor
    successor: Tensor
    projection: nn.Linear
    num_candidates: int


@dataclass(frozen=True)
class ConfidenceSpec:
    """See :class:`draftwise.models.heads.confidence.ConfidenceHead`.

    Attributes:
        weight: ``[1, inputs]``.
        bias: ``[1]``.
        embedding: ``[target_vocab, rank]`` that of the Markov head; ``None`` if it is not read.
        temperatures: ``[num_drafted]`` by which the logit of each position is divided.
    """

    weight: Tensor
    bias: Tensor
    embedding: Tensor | None
    temperatures: tuple[float, ...]


@dataclass(frozen=True)
class BlockSpec:
    """A head of DFlash, DFlash-2 or DSpark.

    See :class:`draftwise.models.heads.block_forward.BlockForward`.

    Attributes:
        embedding: ``[tokens, hidden]`` the token embedding.
        embedding_scale: factor of the embedded rows.
        fusion: the linear layer from the target's states to a row of the context.
        context_norm: norm of these rows.
        layers: the decoder layers.
        views: ``[layers]`` what the rows of a block attend to.
        norm: norm before the projection to the vocabulary.
        head: the projection to the vocabulary; ``None`` for the target's.
        logit_scale: factor of the logits.
        logit_softcap: limit of the logits; ``None`` for no limit.
        block_size: rows of a block.
        mask_token_id: the token of all rows but the first.
        discards_anchor: whether the first row predicts nothing.
        markov: the Markov head; ``None`` for none.
        convolutions: ``[layers]`` those of the attention and of the feed-forward block; empty for
            none.
        selector: the selector; ``None`` for none.
        confidence: the confidence head; ``None`` for none.
        num_heads, num_kv_heads, head_size, hidden_size, activation, scaling,
            softcap, residual_scale: see :class:`draftwise.models.decoder_spec.DecoderSpec`.
        rotary: the rotary embedding.
    """

    embedding: Tensor
    embedding_scale: float
    fusion: nn.Linear
    context_norm: NormSpec
    layers: tuple[LayerSpec, ...]
    views: tuple[BlockView, ...]
    norm: NormSpec
    head: nn.Linear | None
    logit_scale: float
    logit_softcap: float | None
    block_size: int
    mask_token_id: int
    discards_anchor: bool
    markov: MarkovSpec | None
    convolutions: tuple[tuple[ConvolutionSpec, ConvolutionSpec], ...]
    selector: SelectorSpec | None
    confidence: ConfidenceSpec | None
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    activation: Activation
    scaling: float
    softcap: float | None
    residual_scale: float
    rotary: RotaryTable


def block_spec(
    config: BlockHeadConfig,
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    max_model_len: int,
) -> BlockSpec:
    """Describe a head that drafts blocks.

    Args:
        config: its configuration.
        tensors: its weights by the names of :class:`draftwise.models.heads.HeadWeights`, in one
            dtype and on one device.
        embedding: ``[target_vocab, hidden]`` the token embedding, its own or the target's.
        max_model_len: longest context that is served.

    Raises:
        UnsupportedModelError: the activation is not supported.
    """
    parts = HeadParts(config, tensors)
    windows = [None if w is None or w >= max_model_len else w for w in config.windows]
    markov = None
    if config.markov is not None:
        name = {MarkovKind.GATED: "gate_proj", MarkovKind.RNN: "joint_proj"}.get(config.markov.kind)
        markov = MarkovSpec(
            config.markov.kind,
            tensors["markov_head.markov_w1.weight"],
            parts.linear("markov_head.markov_w2"),
            None if name is None else parts.linear(f"markov_head.{name}"),
        )
    return BlockSpec(
        embedding,
        config.embedding_scale,
        parts.linear("fc"),
        parts.norm("hidden_norm.weight"),
        parts.layers(),
        tuple(
            BlockView(window, config.windows_from_anchor, is_causal)
            for window, is_causal in zip(windows, config.is_causal, strict=True)
        ),
        parts.norm("norm.weight"),
        parts.linear("lm_head") if "lm_head.weight" in tensors else None,
        config.logit_scale,
        config.logit_softcap,
        config.block_size,
        config.mask_token_id,
        config.discards_anchor,
        markov,
        _convolutions(config, tensors, parts),
        _selector(config, tensors, parts),
        _confidence(config, tensors),
        *head_sizes(config),
        RotaryTable(head_rotary(config).to(embedding.device), None),
    )


def _convolutions(
    config: BlockHeadConfig, tensors: Mapping[str, Tensor], parts: HeadParts
) -> tuple[tuple[ConvolutionSpec, ConvolutionSpec], ...]:
    """The convolutions of each layer."""
    convolution = config.convolution
    if convolution is None:
        return ()
    size = convolution.group_size

    def spec(name: str) -> ConvolutionSpec:
        projection = parts.linear(f"{name}.kernel_projection")
        return ConvolutionSpec(tensors[f"{name}.base_kernel"], projection, size)

    names = [f"layers.{index}." for index in range(config.num_layers)]
    return tuple((spec(name + "attention_conv"), spec(name + "mlp_conv")) for name in names)


def _selector(
    config: BlockHeadConfig, tensors: Mapping[str, Tensor], parts: HeadParts
) -> SelectorSpec | None:
    """The selector, if there is one."""
    if config.selector is None:
        return None
    name = "candidate_selector."
    return SelectorSpec(
        tensors[name + "predecessor_codebook"],
        tensors[name + "successor_codebook"],
        parts.linear(name + "hidden_projection"),
        config.selector.num_candidates,
    )


def _confidence(config: BlockHeadConfig, tensors: Mapping[str, Tensor]) -> ConfidenceSpec | None:
    """The confidence head, if there is one."""
    if not config.has_confidence:
        return None
    name, embedding = "confidence_head.proj.", None
    if config.confidence_reads_markov:
        embedding = tensors["markov_head.markov_w1.weight"]
    temperatures = config.confidence_temperatures or (1.0,) * config.num_drafted
    return ConfidenceSpec(tensors[name + "weight"], tensors[name + "bias"], embedding, temperatures)


def block_decoder(spec: BlockSpec) -> DecoderSpec:
    """A head without convolutions as a decoder, whose layers also attend to a context."""
    return DecoderSpec(
        embedding_of(spec.embedding),
        spec.embedding_scale,
        spec.layers,
        spec.norm,
        spec.head,
        spec.logit_scale,
        spec.logit_softcap,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_size,
        spec.hidden_size,
        spec.activation,
        spec.scaling,
        spec.softcap,
        spec.residual_scale,
        {ROTARY: spec.rotary},
        StateInputSpec(spec.fusion, None, (), spec.context_norm, False, True, is_context=True),
    )


def block_layers(spec: BlockSpec) -> list[LayerShape]:
    """The keys and values of each layer for one token."""
    heads, size = spec.num_kv_heads, spec.head_size
    return [LayerShape(heads, size, size, view.kept) for view in spec.views]
