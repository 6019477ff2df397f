"""A new head that drafts blocks, for a target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from draftwise.checkpoints.heads import HeadKind
from draftwise.checkpoints.heads.block_config import BlockHeadConfig, MarkovConfig, MarkovKind
from draftwise.distillation.block_head import BlockHead
from draftwise.distillation.documents import Document
from draftwise.distillation.settings import TrainingSettings
from draftwise.distillation.start import begin_norm, common_settings, default_layers
from draftwise.distillation.teacher import Teacher

_FEWEST_STATES = 3
_SHALLOW = 8


def default_states(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The states that a new head reads: as many as it has layers, and at least three.

    They are spread evenly from the output of the target's second layer to that of the third layer
    from the end. In a target of fewer than 8 layers they are those of a head of EAGLE-3.
    """
    if num_target_layers < _SHALLOW:
        return default_layers(num_target_layers)
    first, last, count = 2, num_target_layers - 2, max(_FEWEST_STATES, num_layers)
    spread = (round(first + (last - first) * index / (count - 1)) for index in range(count))
    return tuple(sorted(set(spread)))


def mask_token(documents: Sequence[Document], vocab_size: int) -> int:
    """The token that stands for those to be predicted: the highest id of those that occur least.

    Its embedding is not trained, so it should mean nothing. In most vocabularies the highest ids
    are reserved.
    """
    counts = Counter(token for each in documents for token in each.tokens)
    return min(range(vocab_size), key=lambda token: (counts[token], -token))


def new_block_head(
    settings: TrainingSettings, teacher: Teacher, target_ids: Tensor, scale: Tensor, mask: int
) -> BlockHead:
    """A head with random weights, which reads the embedding and the projection of the target.

    Args:
        settings: its kind, its sizes and the seed.
        teacher: the target.
        target_ids: ``[draft_vocab]`` the target's ids of the tokens that it proposes.
        scale: ``[num_states * hidden]`` root mean square of the target's states.
        mask: the token that stands for those to be predicted.
    """
    is_dspark = settings.kind == HeadKind.DSPARK
    num_layers = settings.num_layers
    config = BlockHeadConfig(
        kind=HeadKind(settings.kind),
        ids_key="aux_hidden_state_layer_ids",
        block_size=settings.block_size,
        mask_token_id=mask,
        discards_anchor=not is_dspark,
        is_causal=(False,) * num_layers,
        windows_from_anchor=True,
        markov=MarkovConfig(MarkovKind(settings.markov), settings.markov_rank)
        if is_dspark
        else None,
        has_confidence=is_dspark,
        confidence_reads_markov=is_dspark,
        **common_settings(teacher, len(target_ids), num_layers),
    )
    projection = teacher.projection
    if len(target_ids) < teacher.vocab_size:
        projection = projection[target_ids.to(teacher.device)]
    torch.manual_seed(settings.seed)
    head = BlockHead(config, projection).to(teacher.device)
    head.state_scale.copy_(scale)
    begin_norm(head.norm, head.projection, teacher)
    return head


def shares_projection(head: BlockHead, teacher: Teacher) -> bool:
    """Whether a served head can use the target's projection, and needs no copy of it.

    The target may apply a bias, a factor or a limit to its logits. The head is trained without.
    """
    if head.config.draft_vocab_size < teacher.vocab_size:
        return False
    probe = torch.randn(4, teacher.hidden_size, generator=torch.Generator().manual_seed(0))
    probe = probe.to(teacher.device, head.projection.dtype)
    return torch.equal(teacher.logits(probe), F.linear(probe, head.projection))
