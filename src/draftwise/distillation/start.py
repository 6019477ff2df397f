"""The head that a run starts from: a new one for a target, or one that is continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.checkpoints.heads import (
    HeadConfig,
    HeadKind,
    HeadLayout,
    HeadWeights,
    find_head,
    read_head,
)
from draftwise.distillation.head import Eagle3Head
from draftwise.distillation.target import rope_theta
from draftwise.distillation.teacher import Teacher
from draftwise.errors import InvalidParameterError, ModelNotFoundError, UnsupportedModelError

_ROLE = "draft"
_SHALLOW = 8
# Some targets have a final norm with which the logits of an untrained head would be far too sure.
_LARGEST_SPREAD = 2.0


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The states that a new head reads.

    For targets of at least 8 layers they are those of EAGLE-3: 2, L // 2 and L - 3. In a shallower
    target these are too close together or the same.
    """
    if num_layers >= _SHALLOW:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({1, (num_layers + 1) // 2, max(num_layers - 1, 1)}))


def new_config(teacher: Teacher, draft_vocab_size: int) -> HeadConfig:
    """Configuration of a new head: sizes of its layer are those of the target's layers."""
    return HeadConfig(
        kind=HeadKind.EAGLE3,
        num_states=len(teacher.layers),
        norm_before_residual=True,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        **common_settings(teacher, draft_vocab_size, 1),
    )


def common_settings(teacher: Teacher, draft_vocab_size: int, num_layers: int) -> dict[str, Any]:
    """What the configurations of new heads of all kinds contain, with sizes of the target."""
    own: Any = teacher.config
    num_heads = int(own.num_attention_heads)
    head_size = int(getattr(own, "head_dim", None) or teacher.hidden_size // num_heads)
    return {
        "layout": HeadLayout.SPECULATORS,
        "hidden_size": teacher.hidden_size,
        "target_hidden_size": teacher.hidden_size,
        "state_layers": teacher.layers,
        "draft_vocab_size": draft_vocab_size,
        "target_vocab_size": teacher.vocab_size,
        "num_layers": num_layers,
        "intermediate_size": int(getattr(own, "intermediate_size", 0) or 4 * teacher.hidden_size),
        "num_heads": num_heads,
        "num_kv_heads": int(getattr(own, "num_key_value_heads", None) or num_heads),
        "head_size": head_size,
        "activation": "silu",
        "rms_norm_eps": float(getattr(own, "rms_norm_eps", 1e-6)),
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta(own)},
        "max_position_embeddings": int(own.max_position_embeddings),
        "windows": (None,) * num_layers,
        "logit_scale": 1.0,
    }


@torch.no_grad()
def new_head(teacher: Teacher, target_ids: Tensor, scale: Tensor, seed: int) -> Eagle3Head:
    """A head with random weights. Its projection is the target's, as is its norm up to a factor."""
    torch.manual_seed(seed)
    head = Eagle3Head(new_config(teacher, len(target_ids))).to(teacher.device)
    head.state_scale.copy_(scale)
    head.lm_head.weight.copy_(teacher.projection[target_ids.to(teacher.device)])
    begin_norm(head.norm, head.lm_head.weight, teacher)
    return head


@torch.no_grad()
def begin_norm(norm: nn.RMSNorm, projection: Tensor, teacher: Teacher) -> None:
    """Let the final norm of a new head be the target's, up to a factor.

    Args:
        norm: the norm.
        projection: ``[draft_vocab, hidden]`` what reads its output.
        teacher: the target.
    """
    of_target = teacher.final_norm()
    if of_target is not None:
        norm.weight.copy_(of_target)
    # Standard deviation of the logits of a random output, whose channels have a mean square of 1.
    spread = (projection * norm.weight).square().sum(dim=1).mean().sqrt().item()
    norm.weight.mul_(min(1.0, _LARGEST_SPREAD / max(spread, 1e-9)))


def read_start(folder: str) -> tuple[HeadConfig, HeadWeights]:
    """Read a head that is to be continued.

    Raises:
        InvalidParameterError: the folder contains no head of EAGLE-3, or it cannot be read.
    """
    try:
        found = find_head(folder) if Path(folder).is_dir() else None
        if found is None:
            raise InvalidParameterError("start_from", f"there is no EAGLE-3 head in {folder!r}")
        config, weights = read_head(found)
    except (ModelNotFoundError, UnsupportedModelError) as error:
        raise InvalidParameterError("start_from", error.message) from error
    if not isinstance(config, HeadConfig) or config.kind is not HeadKind.EAGLE3:
        raise InvalidParameterError(
            "start_from", f"the head in {folder!r} is of {config.kind.label}, not of EAGLE-3"
        )
    return config, weights


def check_head(config: HeadConfig, weights: HeadWeights, target: Any) -> None:
    """Refuse a head that does not fit a target, or that :class:`Eagle3Head` does not compute.

    Args:
        config: configuration of the head.
        weights: weights of the head.
        target: configuration of the target, or of its text part.

    Raises:
        UnsupportedModelError: it was made for another target, or has settings or tensors that
            cannot be trained.
    """
    config.check_target(target.hidden_size, target.vocab_size, target.num_hidden_layers)
    continued_head(config, weights, torch.ones(config.num_states * config.target_hidden_size))


@torch.no_grad()
def continued_head(config: HeadConfig, weights: HeadWeights, scale: Tensor) -> Eagle3Head:
    """A head with the weights of another one.

    Raises:
        UnsupportedModelError: the head has settings or tensors that cannot be trained.
    """
    head = Eagle3Head(config)
    extra = weights.tensors.keys() - dict(head.named_parameters()).keys() - {"embed_tokens.weight"}
    if extra:
        raise UnsupportedModelError(
            _ROLE, f"the head has {sorted(extra)[0]}, which cannot be trained"
        )
    missing = dict(head.named_parameters()).keys() - weights.tensors.keys()
    if missing:
        raise UnsupportedModelError(
            _ROLE, f"the head has no {sorted(missing)[0]}, as heads of EAGLE-3 have"
        )
    # A norm in front of the projection already makes the states alike.
    alike = config.norm_before_fc or config.fc_norm
    head.load_weights(weights.tensors, torch.ones_like(scale) if alike else scale.cpu())
    return head


def embedding_of(teacher: Teacher, weights: HeadWeights) -> Tensor:
    """``[vocab, hidden]`` the embedding that a head reads: its own, or the target's."""
    own = weights.tensors.get("embed_tokens.weight")
    if own is None:
        return teacher.embedding
    return own.to(teacher.device, teacher.embedding.dtype)
