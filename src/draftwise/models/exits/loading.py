"""Exits of a loaded target."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftwise.checkpoints.exits.files import ExitConfig, find_exit, read_exit
from draftwise.checkpoints.exits.names import exit_layers
from draftwise.checkpoints.fingerprint import tensors_fingerprint
from draftwise.checkpoints.source import split_name
from draftwise.errors import DraftwiseError, InvalidParameterError, UnsupportedModelError
from draftwise.kernels.native.part import why_no_adapter
from draftwise.models.exits.adapter import ExitAdapter
from draftwise.models.exits.model import ExitModel
from draftwise.models.loading import LoadedModel
from draftwise.models.model_part import ModelPart
from draftwise.models.packed_model import PackedModel
from draftwise.models.segment import Segment

# Relative error allowed between a pass over all layers and passes over two parts. Both round in the
# same way, but matrix products of other sizes may add in another order.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
_PROBE_LENGTH = 12


def load_exit(name: str, role: str, target: LoadedModel) -> LoadedModel | None:
    """An exit of the target, which shares its weights.

    Args:
        name: the user's name for it, such as ``target:exit=8``, or a folder.
        role: ``"draft"`` or ``"companion"``; named in errors.
        target: the target.

    Returns:
        The exit; ``None`` if the name is that of something else.

    Raises:
        InvalidParameterError: the target has no such exit.
        ModelNotFoundError: a folder has no weights.
        UnsupportedModelError: the target's layers cannot be computed apart, or a folder is damaged
            or that of an exit of another target.
    """
    num_layers, adapter, fingerprint = exit_layers(name, role), None, ""
    folder = find_exit(split_name(name)[0])
    if folder is not None:
        if split_name(name)[1] is not None:
            raise InvalidParameterError(role, f"{name!r} is an exit, which is not quantised")
        config, tensors = read_exit(folder, role)
        _check_target(config, target, role)
        num_layers = config.exit
        fingerprint = f":{tensors_fingerprint(str(config.rms_norm_eps), tensors)}"
        adapter = _adapter(config, tensors, target.model, role)
    if num_layers is None:
        return None
    count = len(target.model.layers)
    if num_layers >= count:
        raise InvalidParameterError(
            role,
            f"{name!r} must leave the target before its last layer, and {target.name!r} has "
            f"{count} layers",
        )
    model = ExitModel(target.model, num_layers, role, adapter)
    _check_parts(model, target.model, role)
    return LoadedModel(
        name,
        model,
        None,
        target.max_model_len,
        frozenset(),
        _num_parameters(target, num_layers) + (0 if adapter is None else adapter.num_parameters),
        f"{target.fingerprint}:exit={num_layers}{fingerprint}",
    )


def _check_target(config: ExitConfig, target: LoadedModel, role: str) -> None:
    """Refuse an exit of another target."""
    sizes = len(target.model.layers), target.model.hidden_size
    if (config.num_hidden_layers, config.hidden_size) != sizes:
        raise UnsupportedModelError(
            role,
            f"the exit was made for a target of {config.num_hidden_layers} layers of size "
            f"{config.hidden_size}, and {target.name!r} has {sizes[0]} of size {sizes[1]}",
        )


def _adapter(
    config: ExitConfig, tensors: Mapping[str, Tensor], target: PackedModel, role: str
) -> ExitAdapter:
    """The adapter of a folder, on the target's device."""
    weights = {name: tensor.to(target.device) for name, tensor in tensors.items()}
    adapter = ExitAdapter(
        weights["norm.weight"],
        weights["down.weight"],
        weights["up.weight"],
        config.rms_norm_eps,
        target.dtype,
    )
    if target.native is not None:
        reason = why_no_adapter(target.native, adapter)
        if reason is not None:
            raise UnsupportedModelError(role, f"an exit with an adapter needs {reason}")
    return adapter


def check_exits(draft: LoadedModel | None, companion: LoadedModel | None) -> None:
    """Refuse a companion that knows no more than the draft.

    Raises:
        InvalidParameterError: both are exits, and that of the companion is not the deeper one.
    """
    models = [None if each is None else each.model for each in (draft, companion)]
    first, second = models
    if not isinstance(first, ExitModel) or not isinstance(second, ExitModel):
        return
    if second.num_layers <= first.num_layers:
        raise InvalidParameterError(
            "companion",
            f"must leave the target later than the draft, which leaves it after "
            f"{first.num_layers} layers",
        )


def _num_parameters(target: LoadedModel, num_layers: int) -> int:
    """Parameters that a pass reads, if all layers have the same size."""
    outside = min(target.num_parameters, target.model.embedding.numel())
    return outside + (target.num_parameters - outside) * num_layers // len(target.model.layers)


@torch.inference_mode()
def _check_parts(model: ExitModel, target: PackedModel, role: str) -> None:
    """Compare a pass over all layers with one to the exit and one from it on.

    Raises:
        UnsupportedModelError: they differ by more than rounding.
    """
    family = target.family
    if target.recurrent:
        raise UnsupportedModelError(
            role, f"no exits in {family} models, whose recurrent layers are computed together"
        )
    length = min(_PROBE_LENGTH, len(target.embedding))
    tokens = list(range(length))
    cache = target.new_cache(2, length)
    whole, parted = ([Segment(slot, 0, length)] for slot in (0, 1))
    try:
        expected = target.forward(cache, tokens, whole, tokens)
        assert expected is not None
        expected = expected.float()
        lower = model.leave(cache, tokens, parted)
        upper = ModelPart(target, model.num_layers, len(target.layers))
        actual = upper.forward(cache, tokens, parted, tokens, lower.stream).logits
        assert actual is not None
    except DraftwiseError as error:
        raise UnsupportedModelError(
            role, f"no exits in {family} models: {error.message}"
        ) from error
    except Exception as error:
        raise UnsupportedModelError(
            role, f"no exits in {family} models, whose layers cannot be computed apart: {error}"
        ) from error
    finite = expected.isfinite()
    scale = expected[finite].std().clamp(min=1e-6)
    errors = torch.where(finite, actual.float() - expected, 0.0).square().mean(dim=-1).sqrt()
    deviation = (errors.max() / scale).item()
    if not deviation <= _TOLERANCE.get(target.dtype, 0.1):
        raise UnsupportedModelError(
            role,
            f"no exits in {family} models: their layers depend on more than the layer before "
            f"(relative error {deviation:.2g})",
        )
