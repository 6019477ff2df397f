"""Loading of models and tokenizers by zoo name, folder or hub id."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from draftwise import zoo
from draftwise.core.formats import QUANTIZATIONS
from draftwise.devices import fast_dtype
from draftwise.errors import (
    DraftwiseError,
    InvalidParameterError,
    ModelNotFoundError,
    UnsupportedModelError,
    VocabularyMismatchError,
    VocabularyWarning,
)
from draftwise.models import gguf
from draftwise.models.adapters import hub_adapter, refuse_adapter
from draftwise.models.attention_interface import ATTENTION_NAME
from draftwise.models.fast_path import slow_path
from draftwise.models.fingerprint import model_fingerprint
from draftwise.models.gguf import GgufFile, find_gguf, is_gguf
from draftwise.models.hub import cached_config, find_on_hub, has_tokenizer
from draftwise.models.lfs import refuse_lfs_pointers
from draftwise.models.native.library import library_for
from draftwise.models.native.suitability import lacks_instructions
from draftwise.models.other_drafts import refuse_other_draft_in
from draftwise.models.packed_model import PackedModel
from draftwise.models.packing import limit_kernel_cache
from draftwise.models.pretrained import PretrainedModel
from draftwise.models.quantization import expand_weights, quantize_linear_layers
from draftwise.models.stored.completeness import check_complete
from draftwise.models.stored.loading import load_checkpoint
from draftwise.models.support import check_config, context_length
from draftwise.models.text_part import absent_encoders, text_model_class
from draftwise.models.vocabulary_map import (
    TokenTranslator,
    is_same_vocabulary,
    probability_share,
)

# What transformers says of a configuration that no causal language model belongs to.
_OTHER_CLASS = re.compile(r"Unrecognized configuration class <class '[\w.]*?(\w+?)(?:Config)?'>")
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
    """

    name: str
    model: PackedModel
    tokenizer: Any
    max_model_len: int
    eos_token_ids: frozenset[int]
    num_parameters: int
    fingerprint: str
    translator: TokenTranslator | None = None


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
    quantization: str | None = None,
) -> LoadedModel:
    """Load a model that the engine can serve.

    Args:
        name: ``zoo:NAME``, a folder, a GGUF file, or a hub id. A suffix ``:int8`` or ``:int4`` sets
            ``quantization``.
        role: ``"target"`` or ``"draft"``; named in errors.
        dtype: dtype that the weights are converted to, or one for each way to compute the model.
        device: device that the weights are moved to.
        max_model_len: longest context to serve; ``None`` for the model's own.
        trust_remote_code: whether to run code that comes with the model.
        may_be_shorter: whether to serve the model's own context if ``max_model_len`` is longer.
        quantization: ``"int8"`` or ``"int4"`` for 8-bit or 4-bit weights.

    Raises:
        ModelNotFoundError: the name or its safetensors weights are not found, or the hub cannot be
            reached and the model is not in the local cache.
        UnsupportedModelError: the architecture or a setting is not supported, or a GGUF file is
            damaged.
        InvalidParameterError: the packages that read GGUF files are not installed.
    """
    limit_kernel_cache()
    if quantization is None:
        name, quantization = split_name(name)
    with no_progress_bars():
        source = _find_source(name, role, trust_remote_code)
        config = _load_config(source, max_model_len)
        context = context_length(config, role, max_model_len, may_be_shorter)
        check_config(config, role, context)
        types = dtype if isinstance(dtype, WeightTypes) else WeightTypes(dtype, dtype)
        model = _load_weights(source, config, types.native)
        if types.other != types.native and slow_path(model) is not None:
            del model
            model = _load_weights(source, config, types.other)
        tokenizer = _load_tokenizer(source)
        # The configuration of a GGUF file already has all of its end tokens.
        end_tokens = _eos_token_ids(model, None if source.gguf else tokenizer)
        if source.gguf is not None and quantization is None and device.type == "cpu":
            gguf.keep_blocks(source.gguf, model)
    fingerprint = model_fingerprint(model, quantization)
    model.to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if quantization is not None:
        quantize_linear_layers(model, quantization)
        if device.type == "cpu":
            expand_weights(model)
    return LoadedModel(
        loaded_name(name, quantization),
        PretrainedModel(model, role, context),
        tokenizer,
        context,
        end_tokens,
        num_parameters,
        fingerprint,
    )


def loaded_name(name: str, quantization: str | None) -> str:
    """The name of a loaded model: the user's name and the quantisation."""
    return name if quantization is None else f"{name}:{quantization}"


def split_name(name: str) -> tuple[str, str | None]:
    """Split a name into model and quantisation: the inverse of :func:`loaded_name`."""
    plain, _, last = name.rpartition(":")
    return (plain, last) if plain and last in QUANTIZATIONS else (name, None)


def match_vocabulary(target: LoadedModel, draft: LoadedModel, role: str) -> LoadedModel:
    """Prepare a draft or companion for the target's vocabulary.

    The width of the logits may differ (padding of the embedding), and one of the two may have added
    tokens. If other tokens differ, the model gets a translator, and proposes only tokens that both
    vocabularies contain.

    Args:
        target: the target.
        draft: the draft or companion.
        role: ``"draft"`` or ``"companion"``; named in the error.

    Returns:
        The draft or companion, with a translator if it needs one.

    Raises:
        VocabularyMismatchError: the vocabularies have no token in common, or they differ and a
            model has no tokenizer to compare them by.
    """
    sizes = target.model.vocab_size, draft.model.vocab_size
    if target.tokenizer is None or draft.tokenizer is None:
        if sizes[0] != sizes[1]:
            raise VocabularyMismatchError(
                role,
                f"{draft.name!r} has {sizes[1]} tokens and the target {target.name!r} has "
                f"{sizes[0]}; without a tokenizer, the two must share a vocabulary",
            )
        return draft
    if is_same_vocabulary(target.tokenizer, draft.tokenizer):
        return draft
    translator = TokenTranslator(target.tokenizer, draft.tokenizer, *sizes)
    if not len(translator.vocabulary):
        raise VocabularyMismatchError(
            role,
            f"the tokenizers of {draft.name!r} and of the target {target.name!r} have no token "
            "in common; choose a model of the target's family",
        )
    share = probability_share(
        draft.model, draft.tokenizer, translator.vocabulary, draft.max_model_len
    )
    warnings.warn(
        f"{role}: {draft.name!r} has another vocabulary than {target.name!r}. "
        f"{len(translator.vocabulary)} of its {sizes[1]} tokens are shared; they hold "
        f"{share:.0%} of its probability on a sample text",
        VocabularyWarning,
        stacklevel=2,
    )
    return replace(draft, translator=translator)


def locate(name: str, role: str) -> str:
    """Resolve a model's name to what ``transformers`` can load: a folder or a hub id.

    Raises:
        ModelNotFoundError: the folder does not exist or contains no model, or pointers of Git LFS
            in place of its files.
        UnsupportedModelError: the folder contains an adapter, or a draft of a kind that Draftwise
            does not run.
        InvalidParameterError: a bundled model cannot have the given size, or its cache cannot be
            written.
    """
    if name.startswith(zoo.PREFIX):
        try:
            return str(zoo.resolve(name))
        except (ModelNotFoundError, InvalidParameterError) as error:
            raise type(error)(role, error.message) from error
    path = Path(name).expanduser()
    if path.is_dir():
        refuse_adapter(path, name, role)
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(role, f"the folder {name!r} has no config.json")
        refuse_other_draft_in(path, name, role)
        refuse_lfs_pointers(path, role)
        return str(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(role, f"there is no folder {name!r}")
    return name


def load_tokenizer(name: str, role: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model as :func:`load_model` does; ``None`` if there is none."""
    with no_progress_bars():
        return _load_tokenizer(_find_source(name, role, trust_remote_code))


@dataclass(frozen=True)
class _Source:
    """Where ``transformers`` loads a model from.

    Attributes:
        name: the user's name for the model.
        role: the model's role; named in errors.
        location: a folder, a hub id, or a GGUF file.
        options: keyword arguments of every ``from_pretrained``.
        gguf: the GGUF file that contains the model, or ``None``.
    """

    name: str
    role: str
    location: str
    options: dict[str, Any]
    gguf: GgufFile | None

    def error(self, error: Exception) -> ModelNotFoundError | UnsupportedModelError:
        """The error for an exception of ``transformers``."""
        return _load_error(self.name, self.role, error)


def _find_source(name: str, role: str, trust_remote_code: bool) -> _Source:
    """Resolve a model's name to what ``transformers`` can load.

    Raises:
        ModelNotFoundError: there is no such file, folder or hub model.
        UnsupportedModelError: a GGUF file is damaged.
        InvalidParameterError: the packages that read GGUF files are not installed.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if is_gguf(name):
        return _Source(name, role, name, options, GgufFile(find_gguf(name, role), role))
    location = locate(name, role)
    if not Path(location).is_dir():
        location = find_on_hub(location, role)
    return _Source(name, role, location, options, None)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep ``transformers`` from writing progress bars and reports.

    What a report says of missing or unexpected weights is checked, and refused where it matters.
    """
    bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _load_config(source: _Source, max_model_len: int | None) -> Any:
    if source.gguf is not None:
        return gguf.read_configuration(source.gguf, max_model_len)
    try:
        config = AutoConfig.from_pretrained(source.location, **source.options)
    except Exception as error:  # a broken file can make the library raise anything
        _refuse_other_draft(source)
        raise source.error(error) from error
    _refuse_other_draft(source)
    return config


def _refuse_other_draft(source: _Source) -> None:
    """Refuse a hub's draft of another kind. Of folders, :func:`locate` refuses them."""
    cached = None if source.gguf else cached_config(source.location)
    if cached is not None:
        refuse_other_draft_in(cached.parent, source.name, source.role)


def _load_weights(source: _Source, config: Any, dtype: torch.dtype) -> nn.Module:
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


def _load_error(
    name: str, role: str, error: Exception
) -> ModelNotFoundError | UnsupportedModelError:
    text = str(error).strip().splitlines()
    reason = text[0] if text else type(error).__name__
    if "trust_remote_code" in str(error):
        return UnsupportedModelError(
            role,
            f"{name!r} contains custom code; if you trust it, set trust_remote_code",
        )
    other_class = _OTHER_CLASS.search(str(error))
    if other_class is not None:
        return UnsupportedModelError(
            role,
            f"{name!r} is a {other_class[1]} model, for which transformers has no causal language "
            "model",
        )
    if ATTENTION_NAME in str(error):
        return UnsupportedModelError(role, f"{name!r} does not support custom attention functions")
    if isinstance(error, OSError):
        # Only the hub's models may still lack a configuration here.
        adapter = hub_adapter(name, role) if "config.json" in str(error) else None
        if adapter is not None:
            return adapter
        return ModelNotFoundError(
            role,
            f"cannot load {name!r} as a folder or hub model with safetensors weights: {reason}; "
            f"bundled models are {', '.join(zoo.PREFIX + known for known in zoo.names())}",
        )
    return UnsupportedModelError(
        role, f"{name!r} cannot be loaded as a causal language model: {reason}"
    )


def _load_tokenizer(source: _Source) -> Any:
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
