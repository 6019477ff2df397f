"""An assistant of Gemma 4 that is ready to run: layers that read the keys of their target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from draftwise.models.heads.draft_head import DraftHead
from draftwise.models.heads.forward import HeadOutput
from draftwise.models.kv_cache import KVCache
from draftwise.models.packed_model import PackedModel

ASSISTANT_ATTENTION = "draftwise_assistant"

# Keys and values ``[kv_heads, tokens, size]`` that the layers of each kind read.
Span = Mapping[str, tuple[Tensor, Tensor]]
# The spans of the rows of the pass that this thread computes.
_spans: ContextVar[Sequence[Span]] = ContextVar("spans")


@dataclass(frozen=True)
class AssistantSpec:
    """An assistant, with what it reads of its target.

    Attributes:
        text: its layers and final norm, a text model of ``transformers`` with the attention
            function of this module.
        entering: ``[hidden, 2 * target_hidden]`` projection of the target's embedding and state.
        leaving: ``[target_hidden, hidden]`` projection to what stands for the target's state.
        head: ``[tokens, hidden]`` projection to the vocabulary.
        groups: ``[groups, tokens of a group]`` int64 ids of the tokens of each group; ``None`` if
            the logits of all tokens are computed.
        centroids: ``[groups, hidden]`` by which groups are chosen; ``None`` without groups.
        num_chosen: number of groups whose logits are computed.
        embedding_scale: factor of the target's embedding.
        sources: the target's layer that layers of each kind read.
        num_visible: the number of newest keys that layers of each kind read; ``None`` for all.
    """

    text: Any
    entering: Tensor
    leaving: Tensor
    head: Tensor
    groups: Tensor | None
    centroids: Tensor | None
    num_chosen: int
    embedding_scale: float
    sources: Mapping[str, int]
    num_visible: Mapping[str, int | None]


class AssistantModel(DraftHead):
    """Layers that have queries only. They attend to the keys and values of a target.

    They read the newest token of a text, which the target has not read yet, with the target's state
    at the position before. Within a draft they read the token drafted last, with their own output
    in place of the state, at the position of the newest token of the text, and attend to the same
    keys.
    """

    def __init__(self, spec: AssistantSpec, target: PackedModel) -> None:
        """Take over an assistant.

        Raises:
            UnsupportedModelError: the target's final norm is not found.
        """
        super().__init__(
            [],
            (len(target.layers),),
            torch.arange(target.vocab_size),
            target,
            target.hidden_size,
            target.embedding,
        )
        self.state_size = target.hidden_size
        self._spec, self._final_norm = spec, target.final_norm()
        scale = torch.tensor(spec.embedding_scale).to(self.dtype)
        self._embedding_scale = scale.to(self.device)

    def span(self, cache: KVCache, cache_slot: int, length: int) -> Span:
        """What the layers read of the first ``length`` tokens of a text. Nothing is copied.

        Args:
            cache: the target's cache.
            cache_slot: the cache slot of the text.
            length: number of tokens that the target has read and kept, at least 1.
        """
        found = {}
        for kind, layer in self._spec.sources.items():
            visible = self._spec.num_visible[kind]
            first = 0 if visible is None else max(0, length - visible)
            # The target's window is one token shorter, and its ring may begin with it.
            if visible is not None and first and not cache.holds(cache_slot, first):
                first += 1
            found[kind] = cache.read_span(layer, cache_slot, first, length)
        return found

    def features(self, states: Tensor) -> Tensor:
        """``[rows, hidden]`` what is read of the states that the target's last layer leaves."""
        return self._final_norm(states.to(self.dtype))

    def read(
        self, tokens: Tensor, features: Tensor, positions: Tensor, spans: Sequence[Span]
    ) -> HeadOutput:
        """Compute one token of each text.

        Args:
            tokens: ``[rows]`` int64.
            features: ``[rows, hidden]`` what :meth:`features` gives for the first token of a draft,
                and then what the pass before has carried.
            positions: ``[rows]`` int64, the position of the newest token of each text.
            spans: ``[rows]`` what the target has stored of each text.
        """
        spec = self._spec
        embedded = F.embedding(tokens, self.embedding) * self._embedding_scale
        entering = torch.cat([embedded, features.to(embedded.dtype)], dim=1)
        token = _spans.set(spans)
        try:
            hidden: Tensor = spec.text(
                inputs_embeds=F.linear(entering, spec.entering).unsqueeze(1),
                position_ids=positions.unsqueeze(1),
                attention_mask=dict.fromkeys(spec.sources),
                shared_kv_states=dict.fromkeys(spec.sources, (None, None)),
                use_cache=False,
            ).last_hidden_state[:, 0]
        finally:
            _spans.reset(token)
        return HeadOutput(self._logits(hidden), F.linear(hidden, spec.leaving))

    def _logits(self, hidden: Tensor) -> Tensor:
        """``[rows, vocab]``. Tokens of groups that are not chosen get one less than the smallest.

        This smallest logit is that of the row, so that a row does not depend on others.
        """
        spec = self._spec
        if spec.groups is None or spec.centroids is None:
            return F.linear(hidden, spec.head)
        scores = F.linear(hidden, spec.centroids)
        ids = spec.groups[scores.topk(spec.num_chosen, dim=-1).indices].flatten(1)
        chosen = (spec.head[ids] @ hidden.unsqueeze(2)).squeeze(2)
        least = chosen.amin(dim=1, keepdim=True) - 1.0
        return least.expand(-1, len(spec.head)).scatter(1, ids, chosen)


def assistant_attention(
    module: nn.Module,
    query: Tensor,
    key: None,
    value: None,
    attention_mask: None,
    scaling: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Attention function for ``transformers``' ``AttentionInterface``: each row reads its span.

    Args:
        module: the attention module, with its ``layer_type``.
        query: ``[rows, heads, 1, size]``.
        key: always ``None``; the spans of the pass contain keys and values.
        value: always ``None``.
        attention_mask: always ``None``; a row attends to all of its span.
        scaling: factor of the scores.
        extra: further arguments of the module, which do not affect the result here.

    Returns:
        ``[rows, 1, heads, size]`` and ``None``.
    """
    kind: str = module.layer_type  # type: ignore[assignment]
    rows = []
    for heads, span in zip(query.squeeze(2), _spans.get(), strict=True):
        keys, values = (each.to(query.dtype) for each in span[kind])
        grouped = heads.view(len(keys), -1, heads.shape[1])
        rows.append(
            F.scaled_dot_product_attention(grouped, keys, values, scale=scaling).flatten(0, 1)
        )
    return torch.stack(rows).unsqueeze(1), None


AttentionInterface.register(ASSISTANT_ATTENTION, assistant_attention)
