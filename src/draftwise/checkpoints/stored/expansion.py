"""The tensors of an unquantised checkpoint that a quantised one stands for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeGuard

from torch import Tensor, nn

from draftwise.checkpoints.stored.files import CheckpointFiles
from draftwise.checkpoints.stored.inputs import QuantizedInputs
from draftwise.checkpoints.stored.layouts import Layout
from draftwise.checkpoints.stored.quantization import REMEDY, Expansion
from draftwise.errors import UnsupportedModelError

# Types of tensors that are not quantised, by their names in the file format.
_PLAIN = frozenset({"F64", "F32", "F16", "BF16", "BOOL", "I64"})
_INPUT_SCALE = ".input_scale"


class ExpandedWeights:
    """The tensors of a quantised checkpoint, with expanded weights.

    Attributes:
        tensors: each tensor by its name, to be read by indexing it with ``...``, as those of
            safetensors files. Expanded weights are float32.
    """

    def __init__(self, files: CheckpointFiles, expansion: Expansion, role: str, name: str) -> None:
        """Find the tensors of each weight.

        Args:
            files: the checkpoint.
            expansion: how its weights are expanded.
            role: the model's role; named in errors.
            name: the user's name for the model.

        Raises:
            UnsupportedModelError: a weight lacks a tensor, or a tensor has a quantised type and is
                no part of a weight.
        """
        self._files, self._expansion, self._role = files, expansion, role
        self.tensors: dict[str, Any] = {}
        left = {each for each in files.names if not each.endswith(expansion.unused)}
        for layout in expansion.layouts:
            keys = sorted(each for each in left if each.endswith(layout.key))
            for stem in (each.removesuffix(layout.key) for each in keys):
                missing = [end for end in layout.required if stem + end not in left]
                if missing:
                    raise UnsupportedModelError(
                        role,
                        f"the weights of {name!r} are incomplete: it has {stem + layout.key} "
                        f"without {stem + missing[0]}",
                    )
                left -= {stem + end for end in layout.ends}
                self.tensors[stem + layout.target] = _Weight(files, layout, stem)
        for each in sorted(left):
            if files.type_name(each) not in _PLAIN:
                raise UnsupportedModelError(
                    role,
                    f"the weights of {name!r} are quantised in an unknown way: {each} has the type "
                    f"{files.type_name(each)} and no scales that are known; {REMEDY}",
                )
            self.tensors[each] = files.part(each)

    def quantize_inputs(self, model: nn.Module) -> None:
        """Let the layers of expanded weights quantise their inputs, where the format says so.

        Raises:
            UnsupportedModelError: a weight is not that of a linear layer.
        """
        quantization = self._expansion.inputs
        if quantization is None:
            return
        linear = {each: module for each, module in model.named_modules() if _is_linear(module)}
        for tensor, weight in self.tensors.items():
            if not isinstance(weight, _Weight) or not weight.was_read:
                continue
            name = tensor.removesuffix(".weight")
            found = _module_named(name, linear)
            if found is None:
                raise UnsupportedModelError(
                    self._role,
                    f"the inputs of {name} are quantised, which is supported for linear layers "
                    f"only; {REMEDY}",
                )
            scale = None
            if not quantization.is_dynamic:
                if name + _INPUT_SCALE not in self._files.names:
                    raise UnsupportedModelError(
                        self._role, f"the inputs of {name} are quantised without {_INPUT_SCALE}"
                    )
                scale = self._files.read(name + _INPUT_SCALE).to(linear[found].weight.dtype)
            model.set_submodule(found, QuantizedInputs(linear[found], quantization, scale))


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear


def _module_named(name: str, modules: Iterable[str]) -> str | None:
    """The module that a checkpoint has under a name; ``None`` if it is not known.

    Models that read images have other names for what is above their layers.
    """
    end = name[name.find("layers.") :]
    found = [each for each in modules if each == name or each.endswith(f".{end}")]
    return found[0] if len(found) == 1 else None


class _Weight:
    """A weight that is expanded when it is indexed.

    Attributes:
        was_read: whether it was.
    """

    def __init__(self, files: CheckpointFiles, layout: Layout, stem: str) -> None:
        self._files, self._layout, self._stem = files, layout, stem
        self.was_read = False

    def __getitem__(self, index: Any) -> Tensor:
        self.was_read = True
        names = {end: self._stem + end for end in self._layout.ends}
        known = self._files.names
        parts = {end: self._files.read(name) for end, name in names.items() if name in known}
        try:
            return self._layout.expand(parts)[index].contiguous()
        except Exception as error:
            raise ValueError(f"{self._stem + self._layout.key}: {error}") from error
