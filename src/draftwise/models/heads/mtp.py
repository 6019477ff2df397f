"""Loading of the MTP layer of a target, which drafts like a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import MtpModel

from draftwise.checkpoints import gguf
from draftwise.checkpoints.fingerprint import layer_fingerprint
from draftwise.checkpoints.heads.origin import warn_of_other_target
from draftwise.checkpoints.mtp import no_mtp
from draftwise.checkpoints.mtp_folder import MtpTarget, check_mtp_folder
from draftwise.checkpoints.quantization import stored_experts, stored_rows
from draftwise.checkpoints.quiet import quiet_transformers
from draftwise.checkpoints.support import ATTENTION_NAME, own_failure
from draftwise.core.formats import MTP_METHOD
from draftwise.errors import DraftwiseError, UnsupportedModelError
from draftwise.kernels.native.suitability import packs_head
from draftwise.models.attention_interface import ShapeProbe, following
from draftwise.models.decoder_families import mtp_spec, why_not_described_mtp
from draftwise.models.heads.model import HeadModel
from draftwise.models.heads.mtp_forward import MtpSpec
from draftwise.models.layer_shape import LayerShape
from draftwise.models.loading import LoadedModel
from draftwise.models.packed_model import LazyEmbedding, embedded
from draftwise.models.packed_modules import can_pack_modules, has_packed_modules, pack_parts
from draftwise.models.pretrained import PretrainedModel

_ROLE = "draft"
# How families count the layers.
_COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
_NAMES = ("layer_types", "mlp_layer_types")
# Families whose layer reads the output of the last layer without the final norm.
_BEFORE_NORM: frozenset[str] = frozenset({"mimo"})


def load_mtp(target: LoadedModel, name: str, folder: Path | None = None) -> LoadedModel:
    """Load the MTP layer of a target.

    Args:
        target: the target.
        name: the user's name of the target, or of the layer with a folder of its own.
        folder: the folder of a layer that was trained for the target; ``None`` for the target's
            own, which is read from its files.

    Raises:
        UnsupportedModelError: the target has no such layer, several that follow each other, or one
            of a family that transformers does not load; or the folder is that of another target.
        ModelNotFoundError: the folder has no weights.
    """
    model: Any = target.model
    if not isinstance(model, PretrainedModel):
        if folder is None:
            raise no_mtp(name)
        raise UnsupportedModelError(
            _ROLE, f"{name!r} is an MTP layer, and {target.name!r} is of no family that has such"
        )
    module: Any = model.module
    text = module.config.get_text_config()
    if target.gguf is not None and folder is None:
        loaded = _read_gguf(target.gguf, model, name)
    else:
        loaded = read_mtp(module, name, folder)
    if folder is not None:
        warn_of_other_target(name, folder, target.name, target.fingerprint)
    loaded.set_attn_implementation(ATTENTION_NAME)
    layer = loaded.layers[0].eval()
    fingerprint = layer_fingerprint(MTP_METHOD, layer)
    why_modules = _why_modules(model, layer)
    if not any(map(_has_blocks, layer.modules())):
        layer.to(model.device, model.dtype)
    else:
        if why_modules is not None:
            pack_parts(layer)
        layer.to(model.dtype)
    spec = MtpSpec(
        layer,
        loaded.rotary_emb,
        model.embedding_as_stored,
        None if text.model_type in _BEFORE_NORM else model.final_norm(),
        model.projection(),
        model.hidden_size,
        mtp_spec(module, layer, loaded.rotary_emb) if why_modules is None else None,
        why_modules,
    )
    return LoadedModel(
        MTP_METHOD if folder is None else name,
        HeadModel(
            spec,
            _layers(spec, target),
            (len(model.layers),),
            torch.arange(model.vocab_size),
            model,
        ),
        None,
        target.max_model_len,
        frozenset(),
        sum(each.numel() for each in layer.state_dict().values()),
        fingerprint,
    )


def _read_gguf(file: gguf.GgufFile, model: PretrainedModel, name: str) -> Any:
    """Read the MTP layer of a GGUF file for its model, with blocks where the model has them.

    Raises:
        UnsupportedModelError: see :func:`load_mtp`.
    """
    if not gguf.num_mtp_layers(file):
        raise no_mtp(name)
    _check_count(gguf.num_mtp_layers(file), name)
    if not gguf.reads_mtp(file):
        raise UnsupportedModelError(
            _ROLE, f"{name!r} is a GGUF file of {file.architecture}, whose MTP layer is not read"
        )
    module: Any = model.module
    _complete(module.config.get_text_config())
    is_lazy = isinstance(model.embedding_as_stored, LazyEmbedding)
    keeps_blocks = is_lazy or has_packed_modules(module)
    try:
        loaded: Any = gguf.load_mtp(file, module, model.dtype, keeps_blocks)
        if keeps_blocks and not _computes_blocks(model, loaded):
            loaded = gguf.load_mtp(file, module, model.dtype, False)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(_ROLE, error.message) from error
    return loaded


def _computes_blocks(model: PretrainedModel, loaded: Any) -> bool:
    """Whether a layer is computed with the blocks of its file, by the kernels or by modules."""
    layer = loaded.layers[0]
    if _why_modules(model, layer) is None:
        return packs_head(mtp_spec(model.module, layer, loaded.rotary_emb))
    return can_pack_modules(layer)


def _has_blocks(module: nn.Module) -> bool:
    return bool(stored_rows(module) or stored_experts(module))


def _check_count(count: int, name: str) -> None:
    """Refuse several layers."""
    if count > 1:
        raise UnsupportedModelError(
            _ROLE, f"{name!r} has {count} MTP layers that follow each other; one is supported"
        )


def _why_modules(model: PretrainedModel, layer: Any) -> str | None:
    """Why transformers' modules compute an MTP layer, as a clause; ``None`` for the kernels."""
    if model.native is None:
        return "it is a layer of its target, which PyTorch's operations compute"
    return why_not_described_mtp(model.module, layer)


def num_mtp_layers(text: Any) -> int:
    """Number of MTP layers of a target by its configuration, or by that of its text part."""
    return next((int(each) for each in (getattr(text, key, 0) for key in _COUNTS) if each), 0)


def read_mtp(module: Any, name: str, folder: Path | None = None) -> Any:
    """Read an MTP layer for a target.

    Args:
        module: the target, as transformers has loaded it.
        name: the user's name of the target, or of the layer with a folder of its own.
        folder: the folder of the layer; ``None`` for the target's own.

    Returns:
        A ``MtpModel`` of transformers with the layer.

    Raises:
        UnsupportedModelError, ModelNotFoundError: see :func:`load_mtp`.
    """
    text = module.config.get_text_config()
    if folder is not None:
        check_mtp_folder(folder, MtpTarget.of(text))
    else:
        count = num_mtp_layers(text)
        if not count:
            raise no_mtp(name)
        _check_count(count, name)
    _complete(text)
    # transformers knows where these layers are in the models that it was tested with. In families
    # that count them as layers, they follow the others.
    known = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    after = rf"^model\.layers\.{text.num_hidden_layers}\."
    module._keys_to_ignore_on_load_unexpected = {*known, after}
    # It reads the files of the target that the configuration names.
    own = module.config.name_or_path
    try:
        module.config.name_or_path = own if folder is None else str(folder)
        with torch.no_grad(), quiet_transformers():
            loaded = MtpModel.from_pretrained(module)
    except Exception as error:  # the library raises anything where weights are missing
        raise UnsupportedModelError(
            _ROLE, f"the MTP layer of {name!r} cannot be loaded: {own_failure(error)}"
        ) from error
    finally:
        module.config.name_or_path = own
    return loaded


def _complete(text: Any) -> None:
    """Say in a configuration what transformers needs to build the layer.

    It is one of full attention, with experts where the target's last layer has some.
    """
    text.num_mtp_layers = 1
    for name in _NAMES:
        types = getattr(text, name, None)
        if types is not None and getattr(text, f"mtp_{name}", None) is None:
            own = "full_attention" if name == "layer_types" else types[-1]
            setattr(text, f"mtp_{name}", [own])


def _layers(spec: MtpSpec, target: LoadedModel) -> list[LayerShape]:
    """The keys and values of the layer."""
    probe = ShapeProbe(_ROLE, target.max_model_len)
    positions = torch.arange(2, device=target.model.device)
    inputs = embedded(positions, spec.embedding).unsqueeze(0)
    positions = positions.unsqueeze(0)
    angles = None if spec.rotary is None else spec.rotary(inputs, position_ids=positions)
    try:
        with torch.inference_mode(), following(probe):
            spec.layer(
                inputs,
                torch.zeros_like(inputs),
                position_embeddings=angles,
                attention_mask=None,
                position_ids=positions,
                past_key_values=None,
            )
    except DraftwiseError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            _ROLE, f"the MTP layer cannot be computed: {own_failure(error)}"
        ) from error
    if list(probe.layers) != [0] or probe.recurrent.shapes:
        raise UnsupportedModelError(_ROLE, "the MTP layer is not one of attention")
    return [probe.layers[0]]
