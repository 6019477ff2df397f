"""The weights of a drafting head: their names, their shapes, and the tokens that it proposes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from draftwise.checkpoints.heads.block_config import BlockHeadConfig
from draftwise.checkpoints.heads.block_weights import block_shapes
from draftwise.checkpoints.heads.config import DraftHeadConfig, HeadConfig, HeadKind
from draftwise.checkpoints.other_drafts import MASK_TOKENS
from draftwise.errors import UnsupportedModelError

_ROLE = "draft"
# Tensors that drafting does not need, by their last part or their first.
_UNUSED = frozenset({"inv_freq"})
# The state that stands for those of tokens to be predicted, in a head of P-EAGLE.
MASK_STATE = "mask_hidden"
_UNUSED_PREFIX = "verifier_"
# Embeddings of DFlash-2 are stored with and without the name of their parameter.
_CODEBOOK = "_codebook.weight"
_TO_TARGET, _IN_DRAFT = "d2t", "t2d"
# Beginnings of names in other layouts. Those of EAGLE-1 and EAGLE-2 are those of ``speculators``.
_OTHER_NAMES: Mapping[HeadKind, Mapping[str, str]] = {
    HeadKind.EAGLE: {
        "fusion_fc.": "fc.",
        "transformer.": "layers.0.",
        "pre_lm_head_layernorm.": "norm.",
    },
    HeadKind.EAGLE3: {"midlayer.": "layers.0."},
    HeadKind.PEAGLE: {"midlayer.": "layers.0."},
}

_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class HeadWeights:
    """The weights of a head, checked.

    Attributes:
        tensors: weights by name: ``fc.weight``, ``embed_tokens.weight`` (optional),
            ``layers.N.…``, ``norm.weight``, ``lm_head.weight``, ``input_norm.weight`` and
            ``fc_norm.N.weight`` where the configuration has them. The norm of the state is
            ``layers.0.hidden_norm.weight``. Heads of EAGLE-1 and EAGLE-2 have ``fc.bias``,
            ``lm_head.weight``, ``embedding_layernorm.weight`` and ``norm.weight`` optionally. Heads
            that draft blocks have those of
            :func:`draftwise.checkpoints.heads.block_weights.block_shapes`.
        target_ids: ``[draft_vocab]`` int64, the target's id of each token that the head proposes.
    """

    tensors: Mapping[str, Tensor]
    target_ids: Tensor


def check_head_weights(config: DraftHeadConfig, stored: Mapping[str, Tensor]) -> HeadWeights:
    """Normalise the names of stored tensors, and check that they fit the configuration.

    Args:
        config: the head's configuration.
        stored: tensors by their names in the files, of either layout.

    Raises:
        UnsupportedModelError: a tensor is missing, unknown or has another shape, or the token ids
            are wrong. The error names the tensor.
    """
    tensors: dict[str, Tensor] = {}
    for stored_name, tensor in stored.items():
        name = normalised(stored_name, config.kind)
        if name in tensors:
            raise UnsupportedModelError(
                _ROLE, f"the head has two tensors {name!r}, one of them under another name"
            )
        if name == MASK_STATE and config.kind is not HeadKind.PEAGLE:
            raise UnsupportedModelError(
                _ROLE,
                f"the head has a tensor {name!r}, as those of P-EAGLE, and config.json has no "
                f"{MASK_TOKENS[0]}; name the token that stands for those to be predicted",
            )
        if not _is_unused(name):
            tensors[name] = tensor
    to_target = in_draft = None
    if config.kind is not HeadKind.EAGLE:
        to_target, in_draft = tensors.pop(_TO_TARGET, None), tensors.pop(_IN_DRAFT, None)
    required, optional = _shapes(config)
    missing = sorted(required.keys() - tensors.keys())
    if missing:
        raise UnsupportedModelError(
            _ROLE,
            f"the weights of the head are incomplete: {len(missing)} are missing, such as "
            f"{missing[0]}",
        )
    known = required | optional
    for name, tensor in tensors.items():
        if name not in known:
            raise UnsupportedModelError(
                _ROLE,
                f"the head has a tensor {name!r}, which no {config.kind.label} head with its "
                "configuration has",
            )
        if tuple(tensor.shape) != known[name]:
            raise UnsupportedModelError(
                _ROLE,
                f"{name} of the head has the shape {list(tensor.shape)}, and its configuration "
                f"asks for {list(known[name])}",
            )
    return HeadWeights(tensors, _target_ids(config, to_target, in_draft))


def is_head_tensor(name: str) -> bool:
    """Whether a stored tensor of this name shows that a folder contains a head."""
    return is_eagle3_tensor(name) or normalised(name, HeadKind.EAGLE) == "fc.weight"


def is_eagle3_tensor(name: str) -> bool:
    """Whether a stored tensor of this name shows that a head is one of EAGLE-3."""
    return normalised(name, HeadKind.EAGLE3) == "layers.0.hidden_norm.weight"


def normalised(name: str, kind: HeadKind) -> str:
    """The name in :class:`HeadWeights` of a stored tensor of either layout."""
    name = name.removeprefix("model.")
    if name.endswith(_CODEBOOK):
        return name.removesuffix(".weight")
    others = _OTHER_NAMES.get(kind, {})
    for prefix, known in others.items():
        if name.startswith(prefix):
            return known + name.removeprefix(prefix)
    return name


def _is_unused(name: str) -> bool:
    return name.rpartition(".")[2] in _UNUSED or name.startswith(_UNUSED_PREFIX)


def _shapes(config: DraftHeadConfig) -> tuple[_Shapes, _Shapes]:
    """Shapes of the tensors that a head must have, and of those that it may have."""
    required, optional = _layer_shapes(config)
    if isinstance(config, BlockHeadConfig):
        others = block_shapes(config)
    else:
        assert isinstance(config, HeadConfig)
        is_eagle = config.kind is HeadKind.EAGLE
        others = _eagle_shapes(config) if is_eagle else _eagle3_shapes(config)
    for known, more in zip((required, optional), others, strict=True):
        known |= more
    optional["embed_tokens.weight"] = (config.target_vocab_size, config.hidden_size)
    return required, optional


def _eagle_shapes(config: HeadConfig) -> tuple[_Shapes, _Shapes]:
    """The same of EAGLE-1 and EAGLE-2 outside the layers."""
    hidden = config.hidden_size
    required: _Shapes = {"fc.weight": (hidden, 2 * hidden)}
    optional: _Shapes = {"lm_head.weight": (config.target_vocab_size, hidden)}
    if config.layernorms:
        required |= {"embedding_layernorm.weight": (hidden,), "norm.weight": (hidden,)}
    if config.fc_bias is not False:
        where = required if config.fc_bias else optional
        where["fc.bias"] = (hidden,)
    return required, optional


def _eagle3_shapes(config: HeadConfig) -> tuple[_Shapes, _Shapes]:
    """The same of EAGLE-3 outside the layers."""
    hidden = config.hidden_size
    states = config.num_states * config.target_hidden_size
    required: _Shapes = {
        "fc.weight": (hidden, states),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    if config.kind is HeadKind.PEAGLE:
        required[MASK_STATE] = (1, 1, states)
    if config.norm_before_fc:
        required["input_norm.weight"] = (states,)
    if config.fc_norm:
        for index in range(config.num_states):
            required[f"fc_norm.{index}.weight"] = (config.target_hidden_size,)
    return required, {}


def _layer_shapes(config: DraftHeadConfig) -> tuple[_Shapes, _Shapes]:
    """The same in the layers."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_size
    keys = config.num_kv_heads * config.head_size
    required: _Shapes = {}
    optional: _Shapes = {}
    is_eagle3 = config.kind in (HeadKind.EAGLE3, HeadKind.PEAGLE)
    # The first layer of EAGLE-1 has no norm in front of the attention.
    is_normed = not isinstance(config, HeadConfig) or is_eagle3 or config.layernorms
    for index in range(config.num_layers):
        layer = f"layers.{index}."
        attention, mlp = layer + "self_attn.", layer + "mlp."
        # The first layer of EAGLE-3 reads the embedding and the state side by side.
        width = 2 * hidden if is_eagle3 and not index else hidden
        if index or is_normed:
            required[layer + "input_layernorm.weight"] = (hidden,)
        required |= {
            attention + "q_proj.weight": (queries, width),
            attention + "k_proj.weight": (keys, width),
            attention + "v_proj.weight": (keys, width),
            attention + "o_proj.weight": (hidden, queries),
            mlp + "gate_proj.weight": (inner, hidden),
            mlp + "up_proj.weight": (inner, hidden),
            mlp + "down_proj.weight": (hidden, inner),
            layer + "post_attention_layernorm.weight": (hidden,),
        }
        optional |= {
            attention + "q_proj.bias": (queries,),
            attention + "k_proj.bias": (keys,),
            attention + "v_proj.bias": (keys,),
            attention + "q_norm.weight": (config.head_size,),
            attention + "k_norm.weight": (config.head_size,),
        }
    return required, optional


def _target_ids(config: DraftHeadConfig, offsets: Tensor | None, in_draft: Tensor | None) -> Tensor:
    """``[draft_vocab]`` the target's id of each token that the head proposes.

    Args:
        config: the head's configuration.
        offsets: ``[draft_vocab]`` the target's id of each token minus its own id.
        in_draft: ``[target_vocab]`` whether the head proposes a token of the target.
    """
    own, targets = config.draft_vocab_size, config.target_vocab_size
    ids = torch.arange(own)
    if offsets is None:
        if own != targets:
            raise UnsupportedModelError(
                _ROLE,
                f"the head proposes {own} of {targets} tokens and has no tensor {_TO_TARGET!r} "
                "that says which",
            )
        return ids
    if tuple(offsets.shape) != (own,) or offsets.is_floating_point():
        raise UnsupportedModelError(
            _ROLE,
            f"{_TO_TARGET} of the head must contain {own} integers, got {offsets.dtype} of the "
            f"shape {list(offsets.shape)}",
        )
    ids = ids + offsets.to(torch.int64).cpu()
    if int(ids.min()) < 0 or int(ids.max()) >= targets:
        raise UnsupportedModelError(
            _ROLE,
            f"{_TO_TARGET} of the head leads to tokens {int(ids.min())} … {int(ids.max())}, and "
            f"the target has {targets}; it must contain offsets, target id minus own id",
        )
    if len(set(ids.tolist())) < own:
        raise UnsupportedModelError(_ROLE, f"{_TO_TARGET} of the head maps two tokens to one")
    if in_draft is not None:
        marked = in_draft.bool().cpu().nonzero().flatten()
        if tuple(in_draft.shape) != (targets,) or not torch.equal(marked, ids.sort().values):
            raise UnsupportedModelError(
                _ROLE, f"{_TO_TARGET} and {_IN_DRAFT} of the head name different tokens"
            )
    return ids
