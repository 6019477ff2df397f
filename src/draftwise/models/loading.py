"""Loading of models and tokenizers by zoo name, folder or hub id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftwise.checkpoints import gguf
from draftwise.checkpoints.fingerprint import model_fingerprint
from draftwise.checkpoints.hub import cached_config, has_tokenizer
from draftwise.checkpoints.other_drafts import refuse_other_draft_in
from draftwise.checkpoints.quantization import (
    expand_weights,
    has_stored_weights,
    quantize_linear_layers,
)
from draftwise.checkpoints.quiet import quiet_transformers
from draftwise.checkpoints.source import Source, find_source, loaded_name, split_name
from draftwise.checkpoints.stored.completeness import check_complete
from draftwise.checkpoints.stored.loading import load_checkpoint
from draftwise.checkpoints.support import ATTENTION_NAME, check_config, context_length
from draftwise.checkpoints.text_part import absent_encoders, text_model_class
from draftwise.devices import fast_dtype
from draftwise.errors import (
    DraftwiseError,
    InvalidParameterError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from draftwise.kernels.native.library import library_for, native_library
from draftwise.kernels.native.suitability import (
    is_large,
    lacks_instructions,
    why_not_packed_whole,
)
from draftwise.models.blocked_linear import limit_kernel_cache
from draftwise.models.fast_path import slow_path
from draftwise.models.packed_model import PackedModel
from draftwise.models.packed_modules import can_pack_modules
from draftwise.models.pretrained import PretrainedModel
from draftwise.models.vocabulary_map import TokenTranslator

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with its tokenizer and metadata.

    Attributes:
        name: the user's name for it, with its quantisation: ``"zoo:draft:int8"``.
        model: the model itself.
        tokenizer: a fast Hugging Face tokenizer, or ``None`` where the folder contains none.
        max_model_len: longest context that is served.
        eos_token_ids: tokens that end a text.
        num_parameters: number of parameters, shared ones counted once.
        fingerprint: identifies the model and its quantisation, independently of its name.
        translator: translates the target's tokens; ``None`` if the model has the same ones.
        trust_remote_code: whether code that comes with the model was allowed to run.
        gguf: the GGUF file that it was loaded from; ``None`` for another source.
    """

    name: str
    model: PackedModel
    tokenizer: Any
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_parameters: int
    fingerprint: str
    translator: TokenTranslator | None = None
    trust_remote_code: bool = False
    gguf: gguf.GgufFile | None = None


@dataclass(frozen=True)
class WeightTypes:
    """The data type that a model's weights are converted to, by what computes the model.

    Attributes:
        native: with the native kernels.
        other: with PyTorch's operations.
    """

    native: torch.dtype
    other: torch.dtype


def weight_types(dtype: str | torch.dtype, device: torch.device) -> WeightTypes:
    """Resolve a dtype for models that an engine runs.

    ``"auto"`` is bfloat16 where that is fast. On a processor without instructions for it, the
    native kernels read it faster than float32 and compute in float32, while PyTorch emulates it.

    Raises:
        InvalidParameterError: not a supported dtype.
    """
    other = resolve_dtype(dtype, device)
    is_native = library_for(device) is not None and not lacks_instructions()
    return WeightTypes(torch.bfloat16 if dtype == "auto" and is_native else other, other)


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """Resolve a dtype for PyTorch's operations.

    ``"auto"`` is bfloat16 where the device multiplies it fast, otherwise float32.

    Raises:
        InvalidParameterError: not a supported dtype.
    """
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    if dtype == "auto":
        return fast_dtype(device)
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise InvalidParameterError("dtype", f"must be auto, {', '.join(_DTYPES)}; got {dtype!r}")
    return _DTYPES[dtype]


def load_model(
    name: str,
    role: str,
    dtype: torch.dtype | WeightTypes,
    device: torch.device,
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    may_be_shorter: bool = False,
) -> LoadedModel:
    """Load a model that the engine can serve.

    Args:
        name: ``zoo:NAME``, a folder, a GGUF file, or a hub id, with a suffix ``:int8`` or ``:int4``
            for 8-bit or 4-bit weights.
        role: ``"target"`` or ``"draft"``; named in errors.
        dtype: dtype that the weights are converted to, or one for each way to compute the model.
        device: device that the weights are moved to.
        max_model_len: longest context to serve; ``None`` for the model's own.
        trust_remote_code: whether to run code that comes with the model.
        may_be_shorter: whether to serve the model's own context if ``max_model_len`` is longer.

    Raises:
        ModelNotFoundError: the name or its safetensors weights are not found, or the hub cannot be
            reached and the model is not in the local cache.
        UnsupportedModelError: the architecture or a setting is not supported, or a GGUF file is
            damaged.
        InvalidParameterError: the packages that read GGUF files are not installed.
    """
    limit_kernel_cache()
    name, quantization = split_name(name)
    with quiet_transformers():
        source = find_source(name, role, trust_remote_code)
        config = _load_config(source, max_model_len)
        context = context_length(config, role, max_model_len, may_be_shorter)
        check_config(config, role, context)
        types = dtype if isinstance(dtype, WeightTypes) else WeightTypes(dtype, dtype)
        model = None
        if source.gguf is not None and quantization is None and device.type == "cpu":
            model = _load_stored(source.gguf, config, types)
        if model is None:
            model = _load_weights(source, config, types.native)
            if types.other != types.native and slow_path(model) is not None:
                del model
                model = _load_weights(source, config, types.other)
        tokenizer = _load_tokenizer(source)
        # The configuration of a GGUF file already has all of its end tokens.
        end_tokens = _eos_token_ids(model, None if source.gguf else tokenizer)
    fingerprint = model_fingerprint(model, quantization)
    if not has_stored_weights(model):
        model.to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if quantization is not None:
        quantize_linear_layers(model, quantization)
        if device.type == "cpu":
            expand_weights(model)
    with quiet_transformers():
        pretrained = PretrainedModel(model, role, context)
    return LoadedModel(
        loaded_name(name, quantization),
        pretrained,
        tokenizer,
        context,
        end_tokens,
        num_parameters,
        fingerprint,
        trust_remote_code=trust_remote_code,
        gguf=source.gguf,
    )


def load_tokenizer(name: str, role: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model as :func:`load_model` does; ``None`` if there is none."""
    with quiet_transformers():
        return _load_tokenizer(find_source(name, role, trust_remote_code))


def _load_config(source: Source, max_model_len: int | None) -> Any:
    if source.gguf is not None:
        return gguf.read_configuration(source.gguf, max_model_len)
    try:
        config = AutoConfig.from_pretrained(source.location, **source.options)
    except Exception as error:  # a broken file can make the library raise anything
        _refuse_other_draft(source)
        raise source.error(error) from error
    _refuse_other_draft(source)
    return config


def _refuse_other_draft(source: Source) -> None:
    """Refuse a hub's draft of another kind. Of folders, :func:`locate` refuses them."""
    cached = None if source.gguf else cached_config(source.location)
    if cached is not None:
        refuse_other_draft_in(cached.parent, source.name, source.role)


def _load_stored(file: gguf.GgufFile, config: Any, types: WeightTypes) -> nn.Module | None:
    """A model that keeps the blocks of its file; ``None`` if the kernels do not read them."""
    if types.native != torch.bfloat16 or native_library() is None:
        return None
    model = gguf.load_stored(file, config, types.native)
    if not is_large(model):
        return None
    if why_not_packed_whole(model) is None:
        return model
    if not can_pack_modules(model):
        return None
    return model if types.other == types.native else gguf.load_stored(file, config, types.other)


def _load_weights(source: Source, config: Any, dtype: torch.dtype) -> nn.Module:
    if source.gguf is not None:
        return gguf.load_weights(source.gguf, config, dtype)
    loader = text_model_class(config, source.role) or AutoModelForCausalLM
    try:
        model, report = load_checkpoint(
            loader,
            source.location,
            config,
            source.role,
            source.name,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            **source.options,
        )
    except DraftwiseError:
        raise
    except Exception as error:  # a broken file can make the library raise anything
        raise source.error(error) from error
    check_complete(report, model.config, source.role, source.name, absent_encoders(model))
    return model


def _load_tokenizer(source: Source) -> Any:
    if source.gguf is not None:
        return gguf.load_tokenizer(source.gguf)
    role, folder = source.role, Path(source.location)
    has_none = folder.is_dir() and not has_tokenizer(file.name for file in folder.iterdir())
    if has_none:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.location, **source.options)
    except Exception as error:  # a broken file can make the library raise anything
        if "trust_remote_code" in str(error):
            raise source.error(error) from error
        raise ModelNotFoundError(role, f"its tokenizer cannot be loaded: {error}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise UnsupportedModelError(role, "its tokenizer has no fast (tokenizer.json) form")
    return tokenizer


def _eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text, of all sources, as a tokenizer may name another than a model."""
    sources = (
        getattr(model, "generation_config", None),
        model.config,
        model.config.get_text_config(),
        tokenizer,
    )
    found = [getattr(each, "eos_token_id", None) for each in sources]
    ids = [each if isinstance(each, list | tuple) else [each] for each in found if each is not None]
    return frozenset(token for each in ids for token in each)
