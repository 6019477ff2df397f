"""The recurrent functions of transformers' modules, over packed tokens.

The modules of the families with recurrent layers call functions of the same names: a convolution,
the delta rule, a scan. Within a planned pass these are replaced by ones that continue from the
states of the requests. Projections, gates and norms stay those of the modules.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from draftwise.models.recurrent.plan import current_recurrence
from draftwise.models.recurrent.shapes import (
    PER_HEAD,
    PER_KEY,
    PER_NUMBER,
    ConvolutionShape,
    RecurrentShapes,
    StateShape,
)


class Recurrence(Protocol):
    """Computes the recurrent layers of a pass, which come in a fixed order."""

    def recur(
        self,
        decay: Tensor,
        key: Tensor,
        value: Tensor,
        query: Tensor,
        beta: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`draftwise.models.recurrent.computation.RecurrentPass.recur`."""
        ...

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`draftwise.models.recurrent.computation.RecurrentPass.convolve`."""
        ...


class RecurrentProbe:
    """Records the shapes of a model's recurrent layers. Its results are zeros."""

    def __init__(self) -> None:
        self._states: list[StateShape] = []
        self._convolutions: list[ConvolutionShape] = []

    @property
    def shapes(self) -> RecurrentShapes:
        """What was recorded."""
        return RecurrentShapes(tuple(self._states), tuple(self._convolutions))

    def recur(
        self,
        decay: Tensor,
        key: Tensor,
        value: Tensor,
        query: Tensor,
        beta: Tensor | None = None,
    ) -> Tensor:
        """Record a recurrence."""
        keys, values = key.shape[2], value.shape[2]
        kinds = {keys * values: PER_NUMBER, keys: PER_KEY, 1: PER_HEAD}
        self._states.append(StateShape(key.shape[1], keys, values, kinds[decay.shape[2]]))
        return torch.zeros_like(value, dtype=torch.float32)

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Record a convolution."""
        self._convolutions.append(ConvolutionShape(*weight.shape))
        return torch.zeros_like(inputs, dtype=torch.float32)


def replace_recurrent_functions(model: nn.Module) -> None:
    """Let the recurrent functions that a model's modules call follow the plan of a pass.

    Outside of planned passes they stay as they are.
    """
    for kind in {type(module) for module in model.modules()}:
        module = sys.modules[kind.__module__]
        for name, packed in _FUNCTIONS.items():
            _replace(module, name, packed)
        for name, (method, packed) in _METHODS.items():
            if kind.__name__ == name:
                _replace(kind, method, packed)


def _replace(owner: Any, name: str, packed: Callable[..., Any]) -> None:
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "follows_plan"):
        return

    @wraps(original)
    def follow(*arguments: Any, **options: Any) -> Any:
        recurrence = current_recurrence()
        if recurrence is None:
            return original(*arguments, **options)
        return packed(recurrence, original, *arguments, **options)

    follow.follows_plan = True  # type: ignore[attr-defined]
    setattr(owner, name, follow)


def _convolution(
    recurrence: Recurrence,
    original: Any,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """``causal_conv1d_fn``: ``[1, channels, tokens]``."""
    inputs = hidden_states[0].T.to(weight.dtype)
    result = recurrence.convolve(inputs, weight, bias).to(weight.dtype)
    if activation is not None:
        result = ACT2FN[activation](result)
    return result.to(hidden_states.dtype).T.unsqueeze(0)


def _delta_rule(
    recurrence: Recurrence,
    original: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """``torch_chunk_gated_delta_rule`` and ``chunk_kimi_delta_attention``.

    The decay is one logarithm per head (Yang et al. 2024, Gated DeltaNet), or one per key and head
    (Kimi Linear).
    """
    keys, queries = key[0].float(), query[0].float()
    if use_qk_l2norm_in_kernel:
        normalized = inspect.unwrap(original).__globals__["l2norm"]
        keys, queries = (normalized(each, dim=-1, eps=1e-6) for each in (keys, queries))
    queries = queries / keys.shape[-1] ** 0.5
    repeats = value.shape[2] // keys.shape[1]
    if repeats > 1:
        keys, queries = (each.repeat_interleave(repeats, dim=1) for each in (keys, queries))
    decay = g[0].float().exp()
    decay = decay.unsqueeze(2) if decay.ndim == 2 else decay
    out = recurrence.recur(decay, keys, value[0], queries, beta[0])
    return out.to(query.dtype).unsqueeze(0), None


def _mamba2(
    recurrence: Recurrence,
    original: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    """``mamba2_chunk_scan`` (Dao and Gu 2024, Mamba-2): ``[1, tokens, heads, size]``."""
    steps = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
    if dt_softplus:
        steps = F.softplus(steps)
    steps = steps.clamp(*dt_limit).float()
    inputs, heads = hidden_states[0].float(), hidden_states.shape[2]
    keys, queries = (
        each[0].float().repeat_interleave(heads // each.shape[2], dim=1) for each in (B, C)
    )
    decay = (A.float() * steps).exp().unsqueeze(2)
    out = recurrence.recur(decay, keys, inputs * steps.unsqueeze(2), queries)
    if D is not None:
        out = out + inputs * (D.float().unsqueeze(1) if D.ndim == 1 else D.float())
    return out.unsqueeze(0)


def _mamba(
    recurrence: Recurrence,
    original: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    """``mamba_selective_scan`` (Gu and Dao 2023, Mamba): ``[1, channels, tokens]``.

    The channels are the values of one head.
    """
    steps = dt[0].T if delta_bias is None else dt[0].T + delta_bias.to(dt.dtype)
    if delta_softplus:
        steps = F.softplus(steps)
    inputs, steps = hidden_states[0].T.float(), steps.float()
    decay = (A.float().T * steps.unsqueeze(1)).exp().flatten(1)
    keys, queries = (each[0].T.float() for each in (B, C))
    parts = (decay, keys, inputs * steps, queries)
    out = recurrence.recur(*(each.unsqueeze(1) for each in parts)).squeeze(1)
    if D is not None:
        out = out + inputs * D.float()
    if z is not None:
        out = out * F.silu(z[0].T.float())
    return out.T.unsqueeze(0)


def _lightning(
    recurrence: Recurrence, original: Any, module: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """The forward pass of MiniMax' lightning attention (Qin et al. 2024)."""
    mixed = module.act_fn(module.qkv_proj(hidden_states[0]))
    mixed = mixed.view(len(mixed), module.num_attention_heads, 3 * module.head_dim)
    queries, keys, values = mixed.split(module.head_dim, dim=2)
    decay = torch.exp(-module.slope_rate.float()).view(1, -1, 1).expand(len(mixed), -1, 1)
    out = recurrence.recur(decay, keys, values, queries).to(hidden_states.dtype).flatten(1)
    out = torch.sigmoid(module.output_gate(hidden_states[0])) * module.norm(out)
    return module.out_proj(out).unsqueeze(0), None


def _gated_unit(
    recurrence: Recurrence,
    original: Any,
    module: Any,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """The scan of RecurrentGemma's gated unit (De et al. 2024, Griffin): ``[1, tokens, width]``."""
    decay = (recurrent_gate * ~reset)[0].unsqueeze(1)
    one = torch.ones(decay.shape[0], 1, 1, device=decay.device)
    out = recurrence.recur(decay, one, hidden_states[0].unsqueeze(1), one)
    return out.to(hidden_states.dtype).transpose(0, 1), None


def _gemma_block(
    recurrence: Recurrence, original: Any, module: Any, *arguments: Any, **options: Any
) -> Any:
    """RecurrentGemma's block, whose convolution is a module."""
    convolution = module.conv_1d
    if not hasattr(convolution, "follows_plan"):
        own = convolution.forward

        def follow(inputs: Tensor) -> Tensor:
            planned = current_recurrence()
            if planned is None:
                result: Tensor = own(inputs)
                return result
            weight, bias = convolution.weight.squeeze(1), convolution.bias
            return _convolution(planned, own, inputs, weight, bias)

        convolution.forward, convolution.follows_plan = follow, True
    return original(module, *arguments, **{**options, "use_cache": False})


def _shared_attention(
    recurrence: Recurrence, original: Any, module: Any, *arguments: Any, **options: Any
) -> Any:
    """Zamba's attention, whose modules are shared by layers that name themselves."""
    module.layer_idx = options["layer_idx"] if "layer_idx" in options else arguments[1]
    return original(module, *arguments, **options)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba,
}
# Methods of classes that call no such function.
_METHODS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "MiniMaxLightningAttention": ("forward", _lightning),
    "ZambaAttention": ("forward", _shared_attention),
    "Zamba2Attention": ("forward", _shared_attention),
    "RecurrentGemmaRglru": ("_rnn_scan", _gated_unit),
    "RecurrentGemmaRecurrentBlock": ("forward", _gemma_block),
}
