"""A drafting head that is ready to run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwise.kernels.native.head import NativeHead
from draftwise.kernels.native.suitability import native_head, why_no_native_head
from draftwise.models.decoder_spec import DecoderSpec
from draftwise.models.fast_path import SlowPath
from draftwise.models.heads.draft_head import DraftHead, proposed_ids
from draftwise.models.heads.eagle_forward import EagleForward
from draftwise.models.heads.forward import HeadForward, HeadOutput
from draftwise.models.heads.mtp_forward import MtpForward, MtpSpec
from draftwise.models.heads.spec import EagleSpec
from draftwise.models.kv_cache import KVCache
from draftwise.models.layer_shape import LayerShape
from draftwise.models.memory import upload
from draftwise.models.packed_model import LazyEmbedding, PackedModel
from draftwise.models.packing import PackedBatch
from draftwise.models.segment import Segment
from draftwise.models.static_steps import StepMode
from draftwise.models.tree_tokens import SegmentTree, tree_tokens

_NO_KERNELS = "it is of EAGLE-1 or EAGLE-2, and the native kernels compute heads of EAGLE-3"


class HeadModel(DraftHead):
    """A head that drafts token by token: each pass reads packed tokens together with states.

    Attributes:
        native_head: the native kernels; ``None`` where they do not support the head.
    """

    def __init__(
        self,
        spec: DecoderSpec | EagleSpec | MtpSpec,
        layers: list[LayerShape],
        state_layers: tuple[int, ...],
        target_ids: Tensor,
        target: PackedModel,
    ) -> None:
        """Take over a head. Its linear layers lose their weights.

        Args:
            spec: the head.
            layers: its keys and values.
            state_layers: the target's states that it reads.
            target_ids: ``[draft_vocab]`` int64 target ids of the tokens that it proposes.
            target: the target, whose final norm and projection heads of EAGLE-1 and EAGLE-2 use.

        Raises:
            UnsupportedModelError: the target's final norm is not found.
        """
        embedding: Tensor | LazyEmbedding
        embedding = spec.embedding if isinstance(spec, MtpSpec) else spec.embedding.weight.detach()
        self.native_head: NativeHead | None = None
        self._head_forward: HeadForward | EagleForward | MtpForward | None = None
        reason: str | None
        if isinstance(spec, MtpSpec):
            self.state_size, reason = spec.hidden_size, spec.why_no_decoder
            if spec.decoder is not None:
                reason = why_no_native_head(spec.decoder)
                self.native_head = native_head(NativeHead, spec.decoder, None, target.native)
            if self.native_head is None:
                self._head_forward = MtpForward(spec)
        elif isinstance(spec, EagleSpec):
            self.state_size = spec.hidden_size
            self._head_forward = EagleForward(spec, target.final_norm(), target.projection())
            reason = _NO_KERNELS
        else:
            assert spec.state_input is not None
            self.state_size = spec.state_input.state_size
            reason = why_no_native_head(spec)
            own_ids = proposed_ids(target_ids, target.vocab_size, embedding.device)
            self.native_head = native_head(NativeHead, spec, own_ids)
            if self.native_head is None:
                self._head_forward = HeadForward(spec)
        forward = self._head_forward
        self._can_be_recorded = forward is not None and forward.never_waits
        if isinstance(spec, EagleSpec):  # its passes use the target's norm and projection
            self._can_be_recorded &= target.never_waits
        is_slow = reason is not None and embedding.device.type == "cpu"
        super().__init__(
            layers,
            state_layers,
            target_ids,
            target,
            spec.hidden_size,
            embedding,
            self.native_head,
            SlowPath(reason or "", "") if is_slow else None,
        )
        if self.device.type == "cuda" and self.never_waits:
            self.step_mode = StepMode.GRAPHS

    def read(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        logit_rows: Sequence[int],
        states: Tensor | None = None,
        carried: Tensor | None = None,
        trees: Sequence[SegmentTree | None] | None = None,
    ) -> HeadOutput:
        """Compute packed tokens, write their keys and values, and advance the cache's lengths.

        Args:
            cache: this head's cache. Its entry i stands for token i + 1 of a text.
            tokens: ``[tokens]`` token ids of the target, segment after segment.
            segments: ordered by cache slot, in positions of the cache.
            logit_rows: indices of the packed tokens whose results are returned.
            states: ``[tokens, state_size]`` the target's states at the position before each token;
                ``None`` within a draft.
            carried: ``[tokens, hidden]`` what the pass before returned; ``None`` with ``states``.
            trees: ``[segments]`` the token tree that each segment is part of; ``None`` without
                trees.
        """
        cache.begin_pass(segments)
        tree = None if trees is None else tree_tokens(segments, trees)
        if self.native_head is not None:
            output = HeadOutput(
                *self.native_head.read(cache, tokens, segments, logit_rows, states, carried, tree)
            )
        else:
            assert self._head_forward is not None
            rows = upload(logit_rows, torch.long, self.device)
            what = "states" if carried is None else "carried"
            # Without logits, as of prompts, nothing is projected.
            if len(rows) and self._fits_static(cache, tokens, segments, what, trees is not None):
                steps, entering = self._static_steps(cache), states if carried is None else carried
                compute = self._from_states if carried is None else self._from_carried
                every = steps.run(compute, what, cache, tokens, segments, entering, tree)
                output = HeadOutput(*(each[rows] for each in every))
            else:
                ids, packed = self._pack(cache, tokens, segments, trees)
                output = self._head_forward(ids, packed, states, carried, rows)
        cache.advance_all(segments)
        return output

    def read_next(self, ids: Tensor, packed: PackedBatch, carried: Tensor) -> HeadOutput:
        """Compute a planned pass within a draft that may be recorded.

        Args:
            ids: ``[tokens]`` token ids of the target.
            packed: plan of the pass.
            carried: ``[tokens, hidden]`` what the pass before returned.

        Returns:
            The results of all tokens.
        """
        assert self._head_forward is not None
        return self._head_forward(ids, packed, None, carried, None)

    def _from_states(self, ids: Tensor, packed: PackedBatch, states: Tensor | None) -> HeadOutput:
        assert self._head_forward is not None
        return self._head_forward(ids, packed, states, None, None)

    def _from_carried(self, ids: Tensor, packed: PackedBatch, carried: Tensor | None) -> HeadOutput:
        assert carried is not None
        return self.read_next(ids, packed, carried)

    @property
    def never_waits(self) -> bool:
        """Whether its passes can be recorded, as they never wait for the device."""
        return self._can_be_recorded
