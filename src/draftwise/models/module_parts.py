"""Passes over a part of a model's layers by Hugging Face's own modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from draftwise.models.exits.adapter import ExitAdapter
from draftwise.models.hidden_states import decoder_layers


class ModuleParts:
    """Lets passes of a model compute some of its layers only.

    The other layers hand on the residual stream that they get. So all else stays as the model's own
    code has it, such as masks and settings by the index of a layer.
    """

    def __init__(self, model: Any) -> None:
        """Find the layers.

        Raises:
            UnsupportedModelError: the model's layers are not found.
        """
        self._layers = decoder_layers(model)
        # Whether a layer returns a tuple; known after the first pass that computes one.
        self._returns_tuple: bool | None = None

    @contextmanager
    def only(
        self, layers: range, entering: Tensor | None, adapter: ExitAdapter | None = None
    ) -> Iterator[list[Tensor]]:
        """Within the context, passes compute some of the layers.

        Args:
            layers: indices of these layers. Those from 0 on must be computed first.
            entering: ``[tokens, hidden]`` the residual stream that enters them; ``None`` for that
                of the embedding.
            adapter: maps what leaves them for the logits; ``None`` for none.

        Yields:
            A list that gets the stream ``[tokens, hidden]`` after the last of these layers.
        """
        leaving: list[Tensor] = []

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            self._returns_tuple = isinstance(output, tuple)
            hidden = output[0] if isinstance(output, tuple) else output
            leaving.append(hidden[0] if hidden.dim() > 2 else hidden)
            if adapter is None:
                return output
            adapted = adapter(hidden)
            return (adapted, *output[1:]) if isinstance(output, tuple) else adapted

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            assert entering is not None
            if args:
                return (entering.unsqueeze(0), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": entering.unsqueeze(0)}

        with ExitStack() as undo:
            for index, layer in enumerate(self._layers):
                if index not in layers:
                    undo.enter_context(_replaced_forward(layer, self._hand_on))
            undo.callback(self._layers[layers[-1]].register_forward_hook(after).remove)
            if entering is not None:
                hook = self._layers[layers[0]].register_forward_pre_hook(before, with_kwargs=True)
                undo.callback(hook.remove)
            yield leaving

    def _hand_on(self, *args: Any, **kwargs: Any) -> Any:
        """What a layer that is left out returns."""
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden,) if self._returns_tuple else hidden


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the context, a module's calls run another function."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
