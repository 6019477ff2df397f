"""A head that drafts blocks, ready to run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from draftwise.kernels.native.block_head import NativeBlockHead
from draftwise.kernels.native.suitability import native_head, why_no_native_head
from draftwise.models.fast_path import SlowPath
from draftwise.models.heads.block_forward import BlockForward, BlockOutput
from draftwise.models.heads.block_layer import BlockPlan
from draftwise.models.heads.block_spec import BlockSpec, block_decoder, block_layers
from draftwise.models.heads.confidence import ConfidenceHead
from draftwise.models.heads.draft_head import DraftHead, proposed_ids
from draftwise.models.heads.markov import MarkovHead
from draftwise.models.heads.native_blocks import NativeBlocks
from draftwise.models.heads.selector import CandidateSelector
from draftwise.models.kv_cache import KVCache
from draftwise.models.packed_model import PackedModel
from draftwise.models.segment import Segment

_CONVOLUTIONS = "it has convolutions along the block, which the native kernels do not have"


class BlockHeadModel(DraftHead):
    """A head that predicts a block of tokens in one pass.

    Attributes:
        block_size: rows of a block.
        num_drafted: the number of tokens that a block predicts.
        correction: by which each token depends on the one before; ``None`` if the tokens of a block
            are independent of each other.
        confidence: estimates whether a token will be accepted; ``None`` without such a head.
    """

    def __init__(
        self,
        spec: BlockSpec,
        state_layers: tuple[int, ...],
        target_ids: Tensor,
        target: PackedModel,
    ) -> None:
        """Take over a head. Its linear layers lose their weights.

        Args:
            spec: the head.
            state_layers: the target's states that it reads.
            target_ids: ``[draft_vocab]`` int64 target ids of the tokens that it proposes.
            target: the target, whose projection is used unless the head has its own.
        """
        self.state_size = spec.fusion.in_features
        self.block_size = spec.block_size
        self.num_drafted = spec.block_size - spec.discards_anchor
        self._first = int(spec.discards_anchor)
        device, native = spec.embedding.device, None
        reason: str | None = _CONVOLUTIONS
        if not spec.convolutions:
            decoder = block_decoder(spec)
            reason = why_no_native_head(decoder)
            own_ids = proposed_ids(target_ids, target.vocab_size, device)
            native = native_head(NativeBlockHead, decoder, own_ids)
        self._compute: BlockForward | NativeBlocks
        if native is None:
            self._compute = BlockForward(spec, target.projection())
        else:
            self._compute = NativeBlocks(spec, native, target.projection())
        self.correction: MarkovHead | CandidateSelector | None = None
        if spec.markov is not None:
            self.correction = MarkovHead(spec.markov)
        elif spec.selector is not None:
            self.correction = CandidateSelector(spec.selector)
        self.confidence = None if spec.confidence is None else ConfidenceHead(spec.confidence)
        super().__init__(
            block_layers(spec),
            state_layers,
            target_ids,
            target,
            spec.hidden_size,
            spec.embedding,
            native,
            SlowPath(reason, "") if reason is not None and device.type == "cpu" else None,
        )

    def new_cache(
        self, num_cache_slots: int, capacity: int, max_new_tokens: int | None = None
    ) -> KVCache:
        """Allocate a cache with room for a block after the longest text.

        See :meth:`draftwise.models.packed_model.PackedModel.new_cache`.
        """
        cache = super().new_cache(num_cache_slots, capacity + self.block_size, max_new_tokens)
        cache.hides_stale = False
        return cache

    def read(
        self,
        cache: KVCache,
        states: Tensor | None,
        context: Sequence[Segment],
        anchors: Sequence[int] = (),
        blocks: Sequence[Segment] = (),
        num_positions: int | None = None,
    ) -> BlockOutput | None:
        """Read states of the target, and compute blocks. Only the states stay in the cache.

        Args:
            cache: this head's cache. Its entry i stands for the target's state at position i.
            states: ``[context, state_size]`` states of consecutive positions of each request;
                ``None`` without any.
            context: the positions that the states are of.
            anchors: ``[blocks]`` the newest token of each request that drafts.
            blocks: the blocks, each of which begins at the position of its newest token.
            num_positions: number of tokens of each block whose logits are computed; ``None`` for
                all that a block predicts.

        Returns:
            ``None`` without blocks.
        """
        cache.begin_pass([*context, *blocks])
        count = self.num_drafted if num_positions is None else num_positions
        wanted = range(self._first, self._first + count)
        output = self._compute(BlockPlan(cache, context, blocks), states, anchors, wanted)
        cache.advance_all(context)
        return output
