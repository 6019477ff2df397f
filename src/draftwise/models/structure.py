"""Checks at load that a model's modules compute what its passes over packed tokens compute.

The checks look for differences of structure: another mask, other positions, tokens that influence
other requests, an ignored ``logits_to_keep``. Such differences show in float32 and in a few layers.
In bfloat16 they hide behind rounding: with eager attention, the logits of Qwen2.5-Coder-1.5B differ
from those in float32 by 0.30 of their spread at the worst of 24 positions, and a model with experts
may choose another expert. So a model in bfloat16 is checked twice: its first layers, copied to
float32, exactly, and the whole model roughly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.checkpoints.quantization import has_stored_weights, stored_experts
from draftwise.checkpoints.stored.inputs import quantizes_inputs
from draftwise.checkpoints.support import (
    ATTENTION_NAME,
    RECURRENT_TYPES,
    check_attention,
    own_attention,
    own_failure,
)
from draftwise.errors import DraftwiseError, NumericalError, UnsupportedModelError
from draftwise.kernels.native.suitability import native_decoder
from draftwise.models.attention_interface import ShapeProbe, following
from draftwise.models.float_copy import FloatCopy
from draftwise.models.forward import forward_pass
from draftwise.models.layer_shape import CacheShapes, LayerShape
from draftwise.models.packed_model import PackedModel
from draftwise.models.packed_modules import has_packed_experts, has_packed_modules
from draftwise.models.segment import Segment

_PROBE_LENGTH = 12
# Error of the logits relative to their spread, in float32, at the worst position.
_EXACT_TOLERANCE = 1e-3
# The same where layers round their inputs to 8 bits, by which the smallest difference may become a
# step. Random models of 2 to 6 layers have up to 0.05.
_STEPPED_TOLERANCE = 0.25
# The same in another dtype, at the median position. Independent logits have 1.4; random models with
# 32 small experts have up to 0.4, by the choice of experts alone.
_ROUGH_TOLERANCE = 1.0


class Checks:
    """Checks of one Hugging Face model.

    Attributes:
        model: the model.
        family: its type; named in errors.
        role: its role; named in errors.
        embedding: its token embedding.
    """

    def __init__(self, model: Any, role: str) -> None:
        self.model, self.role = model, role
        self.family: str = model.config.model_type
        with self._refusing("has no text model that runs alone"):
            self.embedding: nn.Embedding = model.get_input_embeddings()
        has_steps = quantizes_inputs(model) or has_packed_experts(model)
        self._tolerance = _STEPPED_TOLERANCE if has_steps else _EXACT_TOLERANCE
        check_attention(model, role)

    @property
    def hidden_size(self) -> int:
        """Size of the residual stream."""
        text = self.model.config.get_text_config()
        size: int = getattr(text, "hidden_size", self.embedding.weight.shape[1])
        return size

    @property
    def vocab_size(self) -> int:
        """Width of the logits.

        Raises:
            UnsupportedModelError: the model has no projection to the vocabulary.
        """
        head = self.model.get_output_embeddings()
        if head is None:
            raise UnsupportedModelError(
                self.role, f"{self.family} has no projection to the vocabulary that is known"
            )
        size: int = head.out_features
        return size

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Turn any exception of the model's own code into an ``UnsupportedModelError``."""
        try:
            yield
        except DraftwiseError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                self.role, f"{self.family} {what}: {own_failure(error)}"
            ) from error

    def probe_ids(self, max_model_len: int) -> Tensor:
        """``[1, length]`` random token ids for the checks."""
        length = min(_PROBE_LENGTH, max_model_len)
        generator = torch.Generator().manual_seed(0)
        size = self.embedding.num_embeddings
        ids = torch.randint(0, size, (1, length), generator=generator)
        device = self.embedding.weight.device
        return ids if device.type == "meta" else ids.to(device)

    def own_logits(self, ids: Tensor) -> Tensor:
        """``[length, vocab]`` float32 logits of the model's own forward pass."""
        with self._refusing("fails in its own forward pass"):
            logits = self._logits(ids, "eager")
        if not bool(logits.isfinite().any()):
            raise NumericalError(self.role, "its weights give no finite logits")
        return logits

    @torch.inference_mode()
    def _logits(self, ids: Tensor, implementation: str) -> Tensor:
        """The model's own logits with an implementation of attention."""
        self.model.set_attn_implementation(implementation)
        try:
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0].float()
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)
        return logits

    def check_finite(self, packed: PackedModel, ids: Tensor) -> None:
        """Refuse a packed model without finite logits.

        Raises:
            NumericalError: its weights give none.
        """
        length = ids.shape[1]
        cache = packed.new_cache(1, length)
        logits = packed.forward(cache, ids[0], [Segment(0, 0, length)], [length - 1])
        assert logits is not None
        if not bool(logits.isfinite().any()):
            raise NumericalError(self.role, "its weights give no finite logits")

    def compare_implementations(self, ids: Tensor, expected: Tensor) -> None:
        """Refuse a model in float32 whose own implementations of attention differ.

        They differ where the model, such as PaliGemma, has another mask than a causal one. Models
        that cap attention scores have one implementation only.

        Args:
            ids: ``[1, length]`` token ids.
            expected: ``[length, vocab]`` logits of its own forward pass, with eager attention.

        Raises:
            UnsupportedModelError: they differ.
        """
        if any(getattr(each, "attn_logit_softcapping", None) for each in self.model.modules()):
            return  # older versions of transformers leave soft-caps out of this implementation
        try:
            logits = self._logits(ids, "sdpa")
        except Exception:  # not every family has both
            return
        self._check(relative_errors(logits, expected).max().item(), "with other attention kernels")

    @torch.inference_mode()
    def learn_layers(self, ids: Tensor, max_model_len: int) -> CacheShapes:
        """What the layers keep of a request.

        Raises:
            UnsupportedModelError: a layer computes attention that is not supported.
        """
        model, tensors = self.model, {}
        if has_stored_weights(model) and not has_packed_modules(model):
            known = (*model.named_parameters(), *model.named_buffers())
            tensors = {name: tensor.to("meta") for name, tensor in known}
            ids = ids.to("meta")
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        probe = ShapeProbe(self.role, max_model_len)
        with (
            self._refusing("cannot run on packed tokens"),
            following(probe),
            _without_experts(model if tensors else None),
            _without_meta_attributes(model if tensors else None),
        ):
            arguments = {"input_ids": ids, "position_ids": positions, "use_cache": False}
            torch.func.functional_call(model, tensors, (), arguments)
        recurrent = probe.recurrent.shapes
        types = getattr(self.model.config.get_text_config(), "layer_types", None) or ()
        unknown = RECURRENT_TYPES.intersection(types) if not recurrent else ()
        if unknown:
            raise UnsupportedModelError(
                self.role, f"{self.family} has recurrent layers of a kind that is not supported"
            )
        count = 1 + max(probe.layers, default=-1)
        if not recurrent and (len(probe.layers) < count or not probe.layers):
            raise own_attention(self.role, self.family)
        if recurrent:
            layers = getattr(self.model.config.get_text_config(), "num_hidden_layers", count)
            count = max(count, layers)
        # Layers with a recurrence have no keys.
        empty = LayerShape(0, 0, 0)
        return CacheShapes([probe.layers.get(index, empty) for index in range(count)], recurrent)

    def compare(self, packed: PackedModel, tokens: Tensor, expected: Tensor) -> None:
        """Refuse a model whose packed form differs from its own by more than rounding.

        In float32 the worst position counts, in another dtype the median position.

        Args:
            packed: runs the model on packed tokens.
            tokens: ``[length]``.
            expected: ``[length, vocab]`` logits of the model's own forward pass.

        Raises:
            UnsupportedModelError: they differ.
        """
        errors = self._errors(packed, tokens, expected)
        if packed.dtype == torch.float32:
            self._check(errors.max().item(), "in packed form")
        else:
            self._check(errors.median().item(), "in packed form", _ROUGH_TOLERANCE)

    def _check(self, deviation: float, how: str, tolerance: float | None = None) -> None:
        if not deviation <= (self._tolerance if tolerance is None else tolerance):
            raise UnsupportedModelError(
                self.role,
                f"{self.family} gives other logits when computed {how} (relative error "
                f"{deviation:.2g}); its attention is not plain causal attention",
            )

    @torch.inference_mode()
    def _errors(self, packed: PackedModel, tokens: Tensor, expected: Tensor) -> Tensor:
        """``[length]`` errors of two packed requests, the larger one of both.

        Each request is computed in two chunks.
        """
        length = len(tokens)
        cache = packed.new_cache(2, length)
        # No pass has the number of tokens of the own pass, which a model might read.
        half = (length - 1) // 2
        pieces = [(0, half), (half, length)] if half else [(0, length)]
        logits = []
        for start, end in pieces:
            count = end - start
            segments = [Segment(0, start, count), Segment(1, start, count)]
            # In reverse order, which detects a model that ignores ``logits_to_keep``.
            rows = list(range(2 * count))[::-1]
            with self._refusing("cannot run on packed tokens"):
                part = packed.forward(cache, tokens[start:end].repeat(2), segments, rows)
            assert part is not None
            logits.append(part.flip(0).view(2, count, -1).float())
        return relative_errors(torch.cat(logits, dim=1), expected).amax(dim=0)


@contextmanager
def _without_experts(model: nn.Module | None) -> Iterator[None]:
    """Let layers of experts return their input. They read numbers, which meta tensors lack."""
    layers = [] if model is None else [each for each in model.modules() if stored_experts(each)]
    for layer in layers:
        layer.forward = lambda hidden_states, *_: hidden_states
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def _without_meta_attributes(model: nn.Module | None) -> Iterator[None]:
    """Undo what a pass on meta tensors keeps in attributes, such as frequencies of longrope."""
    modules = [] if model is None else list(model.modules())
    kept = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, before in zip(modules, kept, strict=True):
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor) and value.is_meta and name not in before:
                    del vars(module)[name]
                elif isinstance(value, Tensor) and value.is_meta:
                    vars(module)[name] = before[name]


def relative_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Errors of logits, as root mean squares over the vocabulary.

    Args:
        actual: ``[..., length, vocab]``.
        expected: ``[length, vocab]``; entries that are not finite are left out.

    Returns:
        ``[..., length]`` relative to the spread of all expected logits.
    """
    finite = expected.isfinite()
    scale = expected[finite].std().clamp(min=1e-6)
    return torch.where(finite, actual - expected, 0.0).square().mean(dim=-1).sqrt() / scale


def check_structure(
    checks: Checks, part: FloatCopy, shapes: CacheShapes, is_native: bool, max_model_len: int
) -> None:
    """Compare the first layers of a model, copied to float32, in packed form with its own modules.

    Args:
        checks: of the model.
        part: the copy.
        shapes: what the layers of the model keep.
        is_native: whether the native kernels will compute the model.
        max_model_len: longest context that is served.

    Raises:
        UnsupportedModelError: the logits differ.
    """
    own = Checks(part.model, checks.role)
    expected = own.own_logits(part.ids)
    own.compare_implementations(part.ids, expected)
    if shapes.recurrent:
        shapes = own.learn_layers(part.ids, max_model_len)
    native = native_decoder(part.model, even_if_slow=True) if is_native else None
    packed = PackedModel(
        own.role,
        own.family,
        shapes.layers[: part.num_layers],
        expected.shape[-1],
        own.hidden_size,
        own.embedding.weight.detach(),
        native,
        None if native else forward_pass(part.model),
        recurrent=shapes.recurrent,
    )
    own.compare(packed, part.ids[0], expected)
