"""The forward pass of decoder-only models without Hugging Face's modules.

With few tokens, a small model's step is mostly overhead of calls between modules. Here they are
left out and projections with the same input are merged. A step of a two-layer draft then takes
about half the time. As for every model, the logits are compared with Hugging Face's at load.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.models.blocked_linear import BlockedLinear, join_linear, padded_rows
from draftwise.models.decoder_layer import DecoderLayer
from draftwise.models.decoder_spec import DecoderSpec
from draftwise.models.exits.adapter import ExitAdapter
from draftwise.models.hidden_states import StateTap
from draftwise.models.kv_cache import KVCache
from draftwise.models.memory import upload
from draftwise.models.norm import Norm
from draftwise.models.packing import PackedBatch

if TYPE_CHECKING:
    from draftwise.models.fused_layers import FusedLayers


class DecoderForward:
    """Embedding, decoder layers, final norm and head on packed tokens."""

    def __init__(self, spec: DecoderSpec) -> None:
        """Take over a model. Its own linear layers lose their weights."""
        self._spec = spec
        weight = spec.embedding.weight
        self._layers = [DecoderLayer(spec, layer, weight.dtype) for layer in spec.layers]
        self._norm = Norm(spec.norm, weight.dtype)
        assert spec.head is not None
        self._head = join_linear([spec.head])
        self._pads = isinstance(self._head, BlockedLinear)
        self._fused: FusedLayers | None = None
        if has_kernels(spec):
            from draftwise.models.fused_layers import FusedLayers

            self._fused = FusedLayers(spec, self._layers)

    def __call__(
        self,
        ids: Tensor,
        packed: PackedBatch,
        logit_rows: Sequence[int] | None,
        tap: StateTap | None = None,
    ) -> Tensor | None:
        """See :class:`draftwise.models.forward.ForwardPass`."""
        hidden = self.hidden(ids, packed, tap)
        if logit_rows is None:
            return None
        return self.logits(hidden[upload(logit_rows, torch.long, ids.device)])

    def hidden(self, ids: Tensor, packed: PackedBatch, tap: StateTap | None = None) -> Tensor:
        """Hidden states of packed token ids ``[tokens]``, before the final norm.

        Args:
            ids: ``[tokens]`` token ids.
            packed: plan of this forward pass.
            tap: collects hidden states before layers; ``None`` for none.

        Returns:
            ``[tokens, hidden]``, followed by padding rows that must not be used.
        """
        hidden = self._embedded(ids)
        if self._fused is not None and packed.ragged is not None:
            return self._fused(hidden, packed, tap)
        return self._through(hidden, packed, range(len(self._layers)), tap)

    def part(
        self,
        ids: Tensor,
        packed: PackedBatch,
        logit_rows: Sequence[int] | None,
        layers: range,
        entering: Tensor | None,
        adapter: ExitAdapter | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """See :class:`draftwise.models.forward.ForwardPass`."""
        hidden = self._embedded(ids) if entering is None else self._padded(entering)
        hidden = self._through(hidden, packed, layers)
        logits = None
        if logit_rows is not None:
            chosen = hidden[upload(logit_rows, torch.long, ids.device)]
            logits = self.logits(chosen if adapter is None else adapter(chosen))
        return logits, hidden[: len(ids)]

    def _padded(self, rows: Tensor) -> Tensor:
        """Rows with padding, once here instead of in every linear layer. It is never read."""
        if not self._pads:
            return rows
        missing = padded_rows(len(rows)) - len(rows)
        return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))

    def _embedded(self, ids: Tensor) -> Tensor:
        """``[tokens, hidden]`` of token ids, perhaps with padding."""
        hidden: Tensor = F.embedding(self._padded(ids), self._spec.embedding.weight)
        if self._spec.embedding_scale != 1:
            hidden = hidden * self._spec.embedding_scale
        return hidden

    def _through(
        self, hidden: Tensor, packed: PackedBatch, layers: range, tap: StateTap | None = None
    ) -> Tensor:
        """The residual stream after some of the layers, with the padding of what enters them."""
        positions = self._padded(packed.positions)
        angles: dict[str | None, tuple[Tensor, Tensor] | None] = {None: None}
        for key, table in self._spec.rotary.items():
            cos, sin = table(positions)
            # One row for all heads of a token.
            angles[key] = cos.to(hidden.dtype).unsqueeze(1), sin.to(hidden.dtype).unsqueeze(1)
        num_tokens = len(packed.positions)
        for index in layers:
            layer = self._layers[index]
            if tap is not None:
                tap.offer(index, hidden, num_tokens)
            hidden = layer(index, hidden, angles[layer.rotary], packed)
        if tap is not None:
            tap.offer(layers.stop, hidden, num_tokens)
        return hidden

    def compile(self, cache: KVCache, trees: bool = False) -> None:
        """Compile the kernels that steps may need, or those that passes over token trees need."""
        if self._fused is not None:
            self._fused.compile(cache, trees)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[tokens, vocab]`` of hidden states ``[tokens, hidden]``."""
        return self.project(self._norm(hidden))

    def project(self, features: Tensor) -> Tensor:
        """See :class:`draftwise.models.forward.ForwardPass`."""
        logits = self._head(features)
        if self._spec.logit_scale != 1:
            logits = logits * self._spec.logit_scale
        if self._spec.logit_softcap is not None:
            logits = self._spec.logit_softcap * torch.tanh(logits / self._spec.logit_softcap)
        return logits


def has_kernels(spec: DecoderSpec) -> bool:
    """Whether :mod:`draftwise.models.fused_layers` computes a model's layers on its device.

    Otherwise PyTorch's operations do, in recorded steps too.
    """
    return (
        spec.embedding.weight.device.type == "cuda"
        and spec.head_size % 2 == 0
        and importlib.util.find_spec("triton") is not None
    )
