"""Hidden states of a model at chosen layers, which a pass returns where somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.errors import UnsupportedModelError

# What families call the norm after the last layer.
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")


class StateTap:
    """Collects the residual stream of one pass.

    State *a* is the input of layer *a*, which is ``hidden_states[a]`` in ``transformers``. The
    number of layers stands for the output of the last layer, before the final norm.

    Attributes:
        layers: the states that are collected, ascending.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        """Set up for one pass.

        Args:
            layers: the states to collect, ascending.
        """
        self.layers = tuple(layers)
        self._parts: list[Tensor] = []
        self._rows: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """``[tokens, states * hidden]`` the states of each token side by side, in its dtype."""
        if self._rows is None:
            self._rows = torch.cat(self._parts, dim=1)
            self._parts = []
        return self._rows

    @rows.setter
    def rows(self, rows: Tensor) -> None:
        self._rows = rows

    def offer(self, layer: int, hidden: Tensor, num_tokens: int) -> None:
        """Keep the residual stream before a layer if it is wanted. Call in order of the layers.

        Args:
            layer: the layer's index.
            hidden: ``[>= num_tokens, hidden]``, which nobody changes in place.
            num_tokens: number of tokens of the pass.
        """
        if layer in self.layers:
            self._parts.append(hidden[:num_tokens])


@contextmanager
def tapped_modules(model: Any, tap: StateTap, num_tokens: int) -> Iterator[None]:
    """Within the context, passes of Hugging Face's own modules fill a tap.

    Args:
        model: a causal language model.
        tap: is filled by the next pass.
        num_tokens: number of tokens of the pass.

    Raises:
        UnsupportedModelError: the model's layers are not found.
    """
    layers = decoder_layers(model)

    def before(index: int) -> Callable[..., None]:
        def offer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            tap.offer(index, hidden[0], num_tokens)

        return offer

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        tap.offer(len(layers), hidden[0] if hidden.dim() > 2 else hidden, num_tokens)

    with ExitStack() as hooks:
        for index, layer in enumerate(layers):
            if index in tap.layers:
                hook = layer.register_forward_pre_hook(before(index), with_kwargs=True)
                hooks.callback(hook.remove)
        if len(layers) in tap.layers:
            hooks.callback(layers[-1].register_forward_hook(after).remove)
        yield


def final_norm(model: Any) -> Callable[[Tensor], Tensor]:
    """The norm between a model's last layer and its projection to the vocabulary.

    Raises:
        UnsupportedModelError: it is not found.
    """
    layers = decoder_layers(model)
    for module in model.base_model.modules():
        if any(child is layers for child in module.children()):
            for name in _FINAL_NORMS:
                norm = getattr(module, name, None)
                if isinstance(norm, nn.Module):
                    return norm
    raise UnsupportedModelError(
        "draft",
        f"the final norm of a {model.config.model_type} target is not found, and the head reads "
        "the states after it",
    )


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of a model's decoder layers.

    Raises:
        UnsupportedModelError: there is no list of the length that the configuration says.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModelError(
        "draft", f"the hidden states of a {model.config.model_type} model cannot be read"
    )
