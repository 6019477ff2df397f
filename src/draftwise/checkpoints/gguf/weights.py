"""The weights of a model in a GGUF file, expanded, and the blocks that they were expanded from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from draftwise.checkpoints.gguf.configuration import architecture_of, is_tied
from draftwise.checkpoints.gguf.file import GgufFile
from draftwise.checkpoints.gguf.latent_attention import set_epsilons
from draftwise.checkpoints.gguf.metadata import Metadata
from draftwise.checkpoints.gguf.parameter_names import MTP
from draftwise.checkpoints.gguf.tensors import HEAD, Source, mtp_sources, sources
from draftwise.checkpoints.quantization import StoredExperts, keep_stored, keep_stored_experts
from draftwise.checkpoints.rotary import rotary_settings
from draftwise.checkpoints.support import ATTENTION_NAME

# Parameters of layers of experts.
_EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def load_weights(file: GgufFile, config: Any, dtype: torch.dtype) -> nn.Module:
    """Load a model with expanded weights.

    Args:
        file: the file.
        config: the model's configuration.
        dtype: data type of the weights.

    Raises:
        UnsupportedModelError: a tensor is missing, unknown, of another shape, or of a type that
            cannot be expanded.
    """
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    shapes = {name: each.shape for name, each in empty.state_dict().items()}
    weights = {}
    for name, source in sources(file, shapes).items():
        if name == HEAD and is_tied(file):
            continue
        numbers = source.read(file, shapes[name])
        # Some models keep norms in float32.
        weights[name] = numbers if numbers.ndim == 1 else numbers.to(dtype)
    model: nn.Module
    model, report = type(empty).from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        output_loading_info=True,
    )
    _finish(file, model)
    lost = sorted({*report["missing_keys"], *report["unexpected_keys"]})
    if lost:
        raise file.error(f"cannot be loaded by transformers: {lost[0]!r} is not a parameter")
    return model


def load_stored(file: GgufFile, config: Any, dtype: torch.dtype) -> nn.Module:
    """Load a model whose linear layers, embedding and experts keep the file's blocks.

    Their weights are meta tensors; :func:`draftwise.checkpoints.quantization.stored_rows` and
    :func:`draftwise.checkpoints.quantization.stored_experts` have their rows, which are views of
    the mapped file.

    Args:
        file: the file.
        config: the model's configuration.
        dtype: data type of the weights that have no blocks and more than one dimension, and of the
            meta tensors.

    Raises:
        UnsupportedModelError: as :func:`load_weights`.
    """
    model: Any
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    _finish(file, model)
    found = sources(file, model.state_dict())
    _fill(file, model, found, dtype, keeps_blocks=True)
    if is_tied(file):
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    filled: nn.Module = model.eval()
    return filled


def load_mtp(file: GgufFile, model: nn.Module, dtype: torch.dtype, keeps_blocks: bool) -> nn.Module:
    """Load the MTP layer of a file for its model.

    Args:
        file: the file; :func:`num_mtp_layers` says that it has one.
        model: the file's model, whose configuration says what kind of layer it is.
        dtype: data type of the weights.
        keeps_blocks: whether linear layers and experts keep the file's blocks, as with
            :func:`load_stored`.

    Returns:
        A ``MtpModel`` of transformers.

    Raises:
        UnsupportedModelError: a tensor is missing, unknown, of another shape, or of a type that
            cannot be expanded.
    """
    with torch.device("meta"):
        loaded: nn.Module = MtpModel(model, 1)
    layer = loaded.get_submodule("layers.0").to(dtype)
    _fill(file, layer, mtp_sources(file, layer.state_dict()), dtype, keeps_blocks)
    return loaded.eval()


def num_mtp_layers(file: GgufFile) -> int:
    """The number of MTP layers that a file contains."""
    metadata = Metadata(file)
    first = f"blk.{metadata.num_layers}.nextn.eh_proj.weight"
    # A file may count layers that it does not have.
    return metadata.num_mtp_layers if first in file.tensors else 0


def reads_mtp(file: GgufFile) -> bool:
    """Whether MTP layers of a file's architecture are read."""
    return MTP.keys() <= architecture_of(file).modules.keys()


def _fill(
    file: GgufFile,
    model: nn.Module,
    found: Mapping[str, Source],
    dtype: torch.dtype,
    keeps_blocks: bool,
) -> None:
    """Give a model's parameters on the meta device their weights, or the file's blocks.

    So with the buffers that the file has. The others are computed from the configuration.
    """
    modules = dict(model.named_modules())
    experts: dict[str, dict[str, StoredExperts]] = defaultdict(dict)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        module, source = modules[owner], found[name]
        is_of_experts = attribute in _EXPERT_WEIGHTS and parameter.ndim > 2
        if keeps_blocks and is_of_experts:
            stored = _stored_experts(file, source, parameter.numel())
            if stored:
                experts[owner][attribute] = stored
                continue
        is_matrix = attribute == "weight" and isinstance(module, nn.Linear | nn.Embedding)
        if keeps_blocks and is_matrix and source.join is None:
            parts = source.parts
            if all(file.is_quantized(part.tensor) for part in parts):
                rows = [
                    file.rows(part.tensor, part.rows, part.scale, part.pieces) for part in parts
                ]
                source.check_rows(file, rows, parameter.shape)
                keep_stored(module, rows)
                continue
        numbers = source.read(file, parameter.shape)
        # Norms and biases keep their precision.
        kept = numbers if numbers.ndim == 1 else numbers.to(dtype)
        setattr(module, attribute, nn.Parameter(kept, requires_grad=False))
    for name, buffer in list(model.named_buffers()):
        if name in found:
            owner, _, attribute = name.rpartition(".")
            setattr(modules[owner], attribute, found[name].read(file, buffer.shape))
    for owner, weights in experts.items():
        keep_stored_experts(modules[owner], weights)


def _stored_experts(file: GgufFile, source: Source, size: int) -> StoredExperts | None:
    """The blocks of a parameter of experts; ``None`` if there are none of its size."""
    changed = (None, None, None)
    parts = [part for part in source.parts if (part.rows, part.scale, part.pieces) == changed]
    if len(parts) < len(source.parts) or not all(file.is_quantized(part.tensor) for part in parts):
        return None
    rows = tuple(file.rows(part.tensor) for part in parts)
    return rows if sum(len(each) * each.num_inputs for each in rows) == size else None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within the context, parameters of new modules are meta tensors. Buffers are not."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
            module._parameters[name] = empty

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _finish(file: GgufFile, model: Any) -> None:
    """Complete what the configuration cannot say, and refuse what the model cannot compute."""
    set_epsilons(model)
    _check_rotary(file, model)


def _check_rotary(file: GgufFile, model: Any) -> None:
    """Refuse a model with one rotary embedding for a configuration of several."""
    by_type = len(rotary_settings(model.config.rope_parameters)) > 1
    if by_type and "layer_type" not in signature(model.model.rotary_emb.forward).parameters:
        raise file.error(
            "has other rotary embeddings in layers with a window, which this version of "
            "transformers does not compute"
        )
