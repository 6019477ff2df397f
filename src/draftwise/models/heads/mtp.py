"""Loading of the MTP layer of a target, which drafts like a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.modeling_layers import MtpModel

from draftwise.checkpoints.fingerprint import tensors_fingerprint
from draftwise.checkpoints.heads.origin import warn_of_other_target
from draftwise.checkpoints.mtp import no_mtp
from draftwise.checkpoints.mtp_folder import MtpTarget, check_mtp_folder
from draftwise.checkpoints.support import ATTENTION_NAME, own_failure
from draftwise.core.formats import MTP_METHOD
from draftwise.errors import DraftwiseError, UnsupportedModelError
from draftwise.models.attention_interface import ShapeProbe, following
from draftwise.models.heads.model import HeadModel
from draftwise.models.heads.mtp_forward import MtpSpec
from draftwise.models.layer_shape import LayerShape
from draftwise.models.loading import LoadedModel
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
    loaded = read_mtp(module, name, folder)
    if folder is not None:
        warn_of_other_target(name, folder, target.name, target.fingerprint)
    loaded.set_attn_implementation(ATTENTION_NAME)
    layer = loaded.layers[0].to(model.device, model.dtype).eval()
    spec = MtpSpec(
        layer,
        loaded.rotary_emb,
        model.embedding,
        None if text.model_type in _BEFORE_NORM else model.final_norm(),
        model.projection(),
        model.hidden_size,
    )
    weights = {key: each.detach() for key, each in layer.state_dict().items()}
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
        sum(each.numel() for each in weights.values()),
        tensors_fingerprint(MTP_METHOD, weights),
    )


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
        if count > 1:
            raise UnsupportedModelError(
                _ROLE, f"{name!r} has {count} MTP layers that follow each other; one is supported"
            )
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
        with torch.no_grad():
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
    embedded = spec.embedding[:2].unsqueeze(0)
    positions = torch.arange(2, device=embedded.device).unsqueeze(0)
    angles = None if spec.rotary is None else spec.rotary(embedded, position_ids=positions)
    try:
        with torch.inference_mode(), following(probe):
            spec.layer(
                embedded,
                torch.zeros_like(embedded),
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
