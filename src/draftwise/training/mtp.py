"""The layer with which a model predicts a second token (MTP), as it is trained and stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer, MtpModel

# Parts of the layer in transformers, and their names in checkpoints of Qwen3.5.
_NAMES = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "post_norm.": "mtp.norm.",
    "mtp_block.": "mtp.layers.0.",
}


@torch.no_grad()
def new_mtp_layer(model: PreTrainedModel) -> MtpLayer:
    """A layer for a model, in float32.

    It begins as another pass through the model's last layer with attention, which reads the sum of
    the next token's embedding and the state. Where that layer has other shapes, it is random.

    Args:
        model: a model whose last layer has attention.
    """
    text: Any = model.config.get_text_config()
    text.num_mtp_layers = 1
    if getattr(text, "layer_types", None):
        text.mtp_layer_types = ["full_attention"]
    layer: MtpLayer = MtpModel(model, 1).layers[0].float()
    own = layer.mtp_block.state_dict()
    last = model.get_decoder().layers[-1].state_dict()
    if _shapes(own) == _shapes(last):
        layer.mtp_block.load_state_dict({name: each.float() for name, each in last.items()})
    identity = torch.eye(text.hidden_size)
    layer.eh_proj.weight.copy_(torch.cat([identity, identity], dim=1))
    return layer


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in tensors.items()}


def mtp_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """The weights of a layer by their names in checkpoints of Qwen3.5."""
    return {
        begin + name.removeprefix(part): weight.detach()
        for name, weight in layer.state_dict().items()
        for part, begin in _NAMES.items()
        if name.startswith(part)
    }


def load_mtp_tensors(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a layer the weights that :func:`mtp_tensors` returned.

    Args:
        layer: the layer.
        tensors: they may contain other tensors too.

    Raises:
        RuntimeError: some are missing, or have other shapes.
    """
    own = {
        part + name.removeprefix(begin): weight
        for name, weight in tensors.items()
        for part, begin in _NAMES.items()
        if name.startswith(begin)
    }
    layer.load_state_dict(own)


def is_mtp_tensor(name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to the layer."""
    return name.startswith("mtp.")
