"""A head of DFlash or DSpark as a trained module.

The reference of the forward pass is :mod:`draftwise.models.heads.block_forward`. Here the blocks of
many positions of a text are computed at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftwise.checkpoints.heads.block_config import BlockHeadConfig, MarkovConfig, MarkovKind
from draftwise.distillation.documents import Rows
from draftwise.distillation.trained_head import MLP, RMSNorm, TrainedHead, rotate

# Cosines and sines of the rotary embedding.
_Angles = tuple[Tensor, Tensor]


class BlockAttention(nn.Module):
    """Attention of blocks to the context before them, and to themselves."""

    def __init__(self, config: BlockHeadConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_size
        queries, keys = config.num_heads * size, config.num_kv_heads * size
        self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.k_proj = nn.Linear(hidden, keys, bias=False)
        self.v_proj = nn.Linear(hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)
        self._kv_heads, self._size = config.num_kv_heads, size

    def forward(
        self, context: Tensor, block: Tensor, angles: tuple[_Angles, _Angles], mask: Tensor
    ) -> Tensor:
        """Attend.

        Args:
            context: ``[rows, length, hidden]`` rows of the context.
            block: ``[rows, anchors, block, hidden]`` normalised rows of the blocks.
            angles: those of the context and those of the blocks.
            mask: ``[rows, anchors, length]`` additive, what each block sees of the context.

        Returns:
            ``[rows, anchors, block, hidden]``.
        """
        num_rows, num_anchors, size, _ = block.shape
        length, groups = context.shape[1], self._kv_heads
        # [rows, kv_heads, length, head_size]
        keys, values = (each.transpose(1, 2) for each in self._keys_values(context, angles[0]))
        # [rows, kv_heads, 1, anchors, block, head_size]
        own_keys, own_values = (
            each.permute(0, 3, 1, 2, 4).unsqueeze(2) for each in self._keys_values(block, angles[1])
        )
        queries = rotate(self.q_norm(self._heads(self.q_proj(block))), *angles[1])
        queries = queries.view(*block.shape[:3], groups, -1, self._size) * self._size**-0.5
        # [rows, kv_heads, heads / kv_heads, anchors, block, head_size]
        queries = queries.permute(0, 3, 4, 1, 2, 5).to(keys.dtype)
        flat = queries.reshape(num_rows, groups, -1, self._size)
        scores = (flat @ keys.transpose(-1, -2)).view(*queries.shape[:-1], length)
        scores = scores.float() + mask[:, None, None, :, None]
        own = (queries @ own_keys.transpose(-1, -2)).float()
        weights = torch.cat([scores, own], dim=-1).softmax(dim=-1).to(values.dtype)
        before = weights[..., :length].reshape(num_rows, groups, -1, length) @ values
        attended = before.view(queries.shape) + weights[..., length:] @ own_values
        attended = attended.permute(0, 3, 4, 1, 2, 5).reshape(num_rows, num_anchors, size, -1)
        out: Tensor = self.o_proj(attended)
        return out

    def _keys_values(self, x: Tensor, angles: _Angles) -> tuple[Tensor, Tensor]:
        """``[…, hidden]`` -> keys and values ``[…, kv_heads, head_size]`` in one data type."""
        values = self._heads(self.v_proj(x))
        return rotate(self.k_norm(self._heads(self.k_proj(x))), *angles).to(values.dtype), values

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._size)


class BlockLayer(nn.Module):
    """A decoder layer of Qwen 3, whose rows are those of blocks."""

    def __init__(self, config: BlockHeadConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, context: Tensor, x: Tensor, angles: tuple[_Angles, _Angles], mask: Tensor
    ) -> Tensor:
        """The residual stream of the blocks after the layer; see :class:`BlockAttention`."""
        x = x + self.self_attn(context, self.input_layernorm(x), angles, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TrainedMarkov(nn.Module):
    """See :class:`draftwise.models.heads.markov.MarkovHead`."""

    def __init__(self, markov: MarkovConfig, config: BlockHeadConfig) -> None:
        super().__init__()
        rank = markov.rank
        self._kind = markov.kind
        self.markov_w1 = nn.Embedding(config.target_vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if markov.kind is MarkovKind.GATED:
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        elif markov.kind is MarkovKind.RNN:
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def features(self, hidden: Tensor, before: Tensor) -> Tensor:
        """``[…, positions, rank]`` what W2 projects to the bias of the logits.

        Args:
            hidden: ``[…, positions, hidden]`` the output of the layers after the final norm.
            before: ``[…, positions]`` the token before each position.
        """
        embedded: Tensor = self.markov_w1(before)
        if self._kind is MarkovKind.VANILLA:
            return embedded
        if self._kind is MarkovKind.GATED:
            gate = self.gate_proj(torch.cat([hidden, embedded], dim=-1))
            return torch.sigmoid(gate) * embedded
        state, outs = torch.zeros_like(embedded[..., 0, :]), []
        for position in range(before.shape[-1]):
            own = (state, embedded[..., position, :], hidden[..., position, :])
            share, candidate, out = self.joint_proj(torch.cat(own, dim=-1)).chunk(3, dim=-1)
            share = torch.sigmoid(share)
            state = share * state + (1 - share) * torch.tanh(candidate)
            outs.append(torch.tanh(out))
        return torch.stack(outs, dim=-2)


class TrainedConfidence(nn.Module):
    """See :class:`draftwise.models.heads.confidence.ConfidenceHead`."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(num_inputs, 1)


class BlockHead(TrainedHead):
    """The trained parameters of a head of DFlash or DSpark.

    The embedding and the projection to the vocabulary are the target's, and are not trained.

    Attributes:
        config: sizes and settings of the head.
        projection: ``[draft_vocab, hidden]`` rows of the target's projection.
        confidence_temperatures: ``[num_drafted]`` by which the logit of the confidence in each
            token is divided.
    """

    projection: Tensor
    confidence_temperatures: Tensor

    def __init__(self, config: BlockHeadConfig, projection: Tensor) -> None:
        """Create the head with random weights.

        Args:
            config: sizes and settings; all layers have full attention that is not causal.
            projection: ``[draft_vocab, hidden]``.
        """
        super().__init__(config, len(config.state_layers))
        self.config = config
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = None if config.markov is None else TrainedMarkov(config.markov, config)
        self.confidence_head = None
        if config.has_confidence:
            read = 0 if config.markov is None else config.markov.rank
            self.confidence_head = TrainedConfidence(config.hidden_size + read)
        self.register_buffer("projection", projection.detach(), persistent=False)
        self.register_buffer("confidence_temperatures", torch.ones(config.num_drafted))
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """See :meth:`TrainedHead.initialise`. No token depends on another one at first."""
        super().initialise()
        if self.markov_head is not None:
            # With weights of the size of a matrix's, it learns too slowly.
            nn.init.normal_(self.markov_head.markov_w1.weight)
            nn.init.zeros_(self.markov_head.markov_w2.weight)
        if self.confidence_head is not None:
            nn.init.zeros_(self.confidence_head.proj.weight)
            nn.init.zeros_(self.confidence_head.proj.bias)

    def forward(self, rows: Rows, states: Tensor, embedding: Tensor, anchors: Tensor) -> Tensor:
        """Compute blocks.

        Args:
            rows: packed documents, on the head's device.
            states: ``[rows, length, num_states * target_hidden]`` the target's states.
            embedding: ``[vocab, hidden]`` the target's input embedding.
            anchors: ``[rows, anchors]`` columns of the newest tokens.

        Returns:
            ``[rows, anchors, num_drafted, hidden]`` after the final norm, from which each token of
            each block is predicted.
        """
        config, size = self.config, self.config.block_size
        context = self.hidden_norm(self.fc(states.float() / self.state_scale))
        ids = anchors.new_full((*anchors.shape, size), config.mask_token_id)
        ids[..., 0] = rows.tokens.gather(1, anchors)
        x = F.embedding(ids, embedding).float()
        positions = rows.positions.gather(1, anchors).unsqueeze(-1)
        positions = positions + torch.arange(size, device=anchors.device)
        angles = self.rotation(rows.positions), self.rotation(positions)
        mask = _visible(rows, anchors)
        for layer in self.layers:
            x = layer(context, x, angles, mask)
        normed: Tensor = self.norm(x)
        return normed[:, :, int(config.discards_anchor) :]

    def features(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """What the Markov head adds to the logits, see :meth:`TrainedMarkov.features`."""
        return None if self.markov_head is None else self.markov_head.features(hidden, before)

    def logits(self, hidden: Tensor, features: Tensor | None) -> Tensor:
        """``[n, draft_vocab]`` of rows ``[n, hidden]`` and features ``[n, rank]``."""
        logits = F.linear(hidden.to(self.projection.dtype), self.projection)
        if self.markov_head is not None and features is not None:
            bias: Tensor = self.markov_head.markov_w2(features)
            logits = logits + bias
        return logits

    def confidence_logits(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """``[…]`` float32 logit of the confidence, without temperature; ``None`` without the head.

        Args:
            hidden: ``[…, hidden]``.
            before: ``[…]`` the token before.
        """
        if self.confidence_head is None:
            return None
        inputs = hidden.float()
        if self.markov_head is not None:
            inputs = torch.cat([inputs, self.markov_head.markov_w1(before).float()], dim=-1)
        # As it is served, in float32.
        with torch.autocast(inputs.device.type, enabled=False):
            logits: Tensor = self.confidence_head.proj(inputs)
        return logits.squeeze(-1)


def _visible(rows: Rows, anchors: Tensor) -> Tensor:
    """``[rows, anchors, length]`` additive mask: the tokens of the document before the anchor."""
    same = rows.documents.gather(1, anchors)[:, :, None] == rows.documents[:, None]
    before = torch.arange(rows.tokens.shape[1], device=anchors.device) < anchors[:, :, None]
    mask = torch.zeros(same.shape, device=anchors.device)
    return mask.masked_fill_(~(same & before), float("-inf"))


def grid_of(begins: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of some positions, row by row.

    Args:
        begins: ``[rows, length]`` marks the positions.

    Returns:
        ``[rows, width]`` columns, and whether there is a position at each place. The width is the
        largest number of positions of a row.
    """
    counts = begins.sum(dim=1)
    places = torch.arange(int(counts.max()), device=begins.device)
    columns = torch.argsort((~begins).to(torch.uint8), dim=1, stable=True)[:, : len(places)]
    return columns, places < counts[:, None]
