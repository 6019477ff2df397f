"""The target as a teacher: hidden states and distributions of packed documents.

A draft model that is only measured is read in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from draftwise.checkpoints.fingerprint import model_fingerprint
from draftwise.checkpoints.quiet import quiet_transformers
from draftwise.checkpoints.source import locate_files
from draftwise.checkpoints.stored.completeness import check_complete
from draftwise.checkpoints.stored.loading import load_checkpoint
from draftwise.distillation.documents import Rows, Unpacked
from draftwise.distillation.target import check_layers
from draftwise.errors import UnsupportedModelError

_PROBE_LENGTH = 8
_TOLERANCE = 0.05
# Rows of hidden states whose logits over the whole vocabulary are computed at once.
_CHUNK = 128
_SMALLEST_SCALE = 1e-3
# Rows from which the scale of the states is measured.
_NUM_SCALE_ROWS = 8


@dataclass(frozen=True)
class Reading:
    """What the target computed for packed rows.

    Attributes:
        states: ``[rows, length, num_states * hidden]`` hidden states side by side.
        final: ``[rows, length, hidden]`` what the target's projection to its vocabulary reads.
        log_sums: ``[rows, length]`` float32 logarithm of the sum over all tokens of exp(logit), of
            the positions that are needed; ``None`` if they were not computed.
    """

    states: Tensor
    final: Tensor
    log_sums: Tensor | None = None

    def autocast(self) -> torch.autocast:
        """Computation in bfloat16 where the target has bfloat16 weights."""
        final = self.final
        use_bfloat16 = final.dtype == torch.bfloat16
        return torch.autocast(final.device.type, torch.bfloat16, enabled=use_bfloat16)


class Teacher:
    """A model whose hidden states are read at chosen layers. It computes no gradients.

    Attributes:
        layers: states that are read: *a* is the input of layer *a*, and the number of layers is
            the output of the last one, before the final norm.
        hidden_size: size of the residual stream.
        vocab_size: number of tokens.
        num_parameters: number of parameters, shared ones counted once.
        num_layers: number of decoder layers.
        config: configuration of the model, or of its text part.
        device: device of the weights.
        fingerprint: identifies the model, as :attr:`LoadedModel.fingerprint` does.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int], role: str = "target") -> None:
        """Prepare a loaded causal language model.

        Args:
            model: the model.
            layers: the states to read.
            role: ``"target"`` or ``"draft"``; named in errors.

        Raises:
            UnsupportedModelError: its layers or its logits cannot be read.
            InvalidParameterError: there is no layer of a given number.
        """
        # Any: transformers' classes have no common type for what is read here.
        self._model = cast(Any, model)
        self._role = role
        self._model.eval().requires_grad_(False)
        own: Any = self._model.config
        self.config: Any = getattr(own, "text_config", None) or own
        blocks = getattr(self._model.base_model, "layers", None)
        head = self._model.get_output_embeddings()
        if not isinstance(blocks, nn.ModuleList) or head is None:
            raise UnsupportedModelError(
                role, f"hidden states of {own.model_type} models cannot be read for training"
            )
        self._blocks, self._head = blocks, head
        self.num_layers = len(blocks)
        self.hidden_size = int(head.weight.shape[1])
        self.vocab_size = int(head.weight.shape[0])
        self.device: torch.device = head.weight.device
        self.num_parameters = sum(each.numel() for each in self._model.parameters())
        self.fingerprint = model_fingerprint(model)
        check_layers(layers, self.num_layers)
        self.layers = tuple(layers)
        self._cached_rows: tuple[Tensor, Tensor] | None = None
        self._is_recurrent = bool(getattr(model, "_is_stateful", False))
        self._transform = self._find_transform()

    @property
    def embedding(self) -> Tensor:
        """``[vocab, hidden]`` the input embedding as it is stored."""
        weight: Tensor = self._model.get_input_embeddings().weight
        return weight

    @property
    def projection(self) -> Tensor:
        """``[vocab, hidden]`` the projection to the vocabulary."""
        weight: Tensor = self._head.weight
        return weight

    @torch.no_grad()
    def final_norm(self) -> Tensor | None:
        """``[hidden]`` the weight of the final norm; ``None`` if there is none, or it has a bias.

        It may be an RMS norm, or a layer norm without a bias.
        """
        norm = getattr(self._model.base_model, "norm", None)
        if norm is None or getattr(norm, "bias", None) is not None:
            return None
        # Some models add 1 to the stored weight. The output shows the weight that is applied: the
        # probe has the mean 0 and the mean square 1, so both kinds of norms leave it as it is.
        probe = self.embedding.new_ones(self.hidden_size)
        probe[1::2] = -1
        return (norm(probe) * probe).float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def read(self, rows: Rows) -> Reading:
        """Compute packed rows, each document on its own."""
        captured: dict[int, Tensor] = {}
        hooks = [self._capture(layer, captured) for layer in self.layers]
        # Attention keeps packed documents apart by their positions, and recurrent layers do not.
        alone = Unpacked.of(rows) if self._is_recurrent else None
        tokens, positions = (rows.tokens, rows.positions) if alone is None else alone.inputs(rows)
        try:
            final = self._model.base_model(
                input_ids=tokens, position_ids=positions, use_cache=False
            ).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        states = [captured[layer] for layer in self.layers]
        if alone is not None:
            states, final = [alone.packed(each) for each in states], alone.packed(final)
        return Reading(torch.cat(states, dim=-1) if states else final[..., :0], final)

    def read_trimmed(self, rows: Rows) -> Reading:
        """Compute packed rows without the columns that are padding in all of them.

        The result has all columns, with zeros in these.
        """
        length = rows.tokens.shape[1]
        used = int((rows.documents >= 0).any(dim=0).sum())
        reading = self.read(rows.first(used))
        missing = (0, 0, 0, length - used)
        return Reading(
            nn.functional.pad(reading.states, missing), nn.functional.pad(reading.final, missing)
        )

    @torch.no_grad()
    def state_scale(self, rows: Rows) -> Tensor:
        """``[num_states * hidden]`` root mean square of each channel of the states.

        What reads them is scaled by it for training. It is measured on the first rows. The first
        token of a document is left out, as some models give it states that are larger by orders of
        magnitude.
        """
        squares, count = torch.zeros((), dtype=torch.float64, device=self.device), 0
        for index in range(min(len(rows), _NUM_SCALE_ROWS)):
            row = rows.take([index], self.device)
            mask = (row.documents >= 0) & (row.positions > 0)
            states = self.read(row).states[mask].double()
            squares = squares + states.square().sum(dim=0)
            count += len(states)
        return (squares / max(count, 1)).sqrt().float().clamp(min=_SMALLEST_SCALE)

    @torch.no_grad()
    def logits(self, final: Tensor, target_ids: Tensor | None = None) -> Tensor:
        """Logits of the target.

        Args:
            final: ``[n, hidden]``.
            target_ids: ``[m]`` tokens whose logits are computed; ``None`` for all tokens.

        Returns:
            ``[n, m]`` in the target's data type.
        """
        weight, bias = self._head.weight, getattr(self._head, "bias", None)
        if target_ids is not None:
            weight = self._rows_of(target_ids)
            bias = None if bias is None else bias[target_ids]
        return self._transform(nn.functional.linear(final, weight, bias))

    @property
    def has_final_norm(self) -> bool:
        """Whether the norm between the last layer and the projection is found."""
        return getattr(self._model.base_model, "norm", None) is not None

    def logits_of_stream(self, stream: Tensor) -> Tensor:
        """Logits ``[..., vocab]`` of a residual stream ``[..., hidden]``, with its gradients.

        The final norm and the projection are the target's.
        """
        final = self._model.base_model.norm(stream.to(self._head.weight.dtype))
        return self.logits_with_gradient(final)

    def logits_with_gradient(self, final: Tensor) -> Tensor:
        """Logits ``[..., vocab]`` of what the projection reads, ``[..., hidden]``."""
        weight, bias = self._head.weight, getattr(self._head, "bias", None)
        return self._transform(nn.functional.linear(final.to(weight.dtype), weight, bias))

    @property
    def model(self) -> Any:
        """The model of transformers."""
        return self._model

    @torch.no_grad()
    def normalizers(self, final: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of the sum over all tokens of exp(logit / temperature), and the best token.

        Args:
            final: ``[n, hidden]``.
            temperatures: ``[n]`` above 0.

        Returns:
            ``[n]`` float32 logarithms and ``[n]`` token ids.
        """
        sums, best = [], []
        for first in range(0, len(final), _CHUNK):
            logits = self.logits(final[first : first + _CHUNK]).float()
            best.append(logits.argmax(dim=-1))
            scaled = logits.div_(temperatures[first : first + _CHUNK, None])
            sums.append(scaled.logsumexp(dim=-1))
        return torch.cat(sums), torch.cat(best)

    def log_sums(self, final: Tensor, needed: Tensor) -> Tensor:
        """``[rows, length]`` :attr:`Reading.log_sums`, and 0 where they are not needed.

        Args:
            final: ``[rows, length, hidden]``.
            needed: ``[rows, length]`` where they are computed.
        """
        found = torch.zeros(needed.shape, device=final.device)
        rows = final[needed]
        if len(rows):
            found[needed] = self.normalizers(rows, torch.ones(len(rows), device=final.device))[0]
        return found

    def _rows_of(self, target_ids: Tensor) -> Tensor:
        """``[m, hidden]`` the projection to some tokens."""
        if self._cached_rows is None or self._cached_rows[0] is not target_ids:
            weight: Tensor = self._head.weight
            is_whole = torch.equal(target_ids, torch.arange(len(weight), device=target_ids.device))
            rows = weight if is_whole else weight[target_ids].contiguous()
            self._cached_rows = target_ids, rows
        return self._cached_rows[1]

    def _capture(self, layer: int, into: dict[int, Tensor]) -> Any:
        """Register a hook that keeps the input of a layer, or the output of the last one."""
        if layer == self.num_layers:

            def after(module: nn.Module, args: Any, output: Any) -> None:
                into[layer] = output[0] if isinstance(output, tuple) else output

            return self._blocks[-1].register_forward_hook(after)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            into[layer] = args[0] if args else kwargs["hidden_states"]

        return self._blocks[layer].register_forward_pre_hook(before, with_kwargs=True)

    @torch.no_grad()
    def _find_transform(self) -> Callable[[Tensor], Tensor]:
        """What the model does with the output of its projection.

        Raises:
            UnsupportedModelError: none of the known transformations gives the model's logits.
        """
        size = min(self._model.get_input_embeddings().num_embeddings, self.vocab_size)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, size, (1, _PROBE_LENGTH), generator=generator).to(self.device)
        final = self._model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        expected = self._model(input_ids=ids, use_cache=False).logits.float()
        raw = self._head(final)
        cap = getattr(self.config, "final_logit_softcapping", None)
        divisor = getattr(self.config, "logits_scaling", None)
        factor = getattr(self.config, "logit_scale", None)
        candidates: list[Callable[[Tensor], Tensor]] = [lambda logits: logits]
        if cap:
            candidates.append(lambda logits: cap * torch.tanh(logits / cap))
        if divisor:
            candidates.append(lambda logits: logits / divisor)
        if factor:
            candidates.append(lambda logits: logits * factor)
        errors = [(each(raw).float() - expected).abs().max().item() for each in candidates]
        best = min(range(len(candidates)), key=errors.__getitem__)
        if errors[best] <= _TOLERANCE * max(expected.std().item(), 1e-6):
            return candidates[best]
        raise UnsupportedModelError(
            self._role, f"the logits of {self._model.config.model_type} are not a plain projection"
        )


def load_teacher(
    name: str,
    layers: Callable[[int], Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    role: str = "target",
) -> Teacher:
    """Load a model as a teacher.

    Args:
        name: a folder, a hub id or a zoo name.
        layers: returns the states to read for a number of layers.
        dtype: data type of the weights.
        device: device of the weights.
        trust_remote_code: whether to run code that comes with the model.
        role: ``"target"`` or ``"draft"``; named in errors.

    Raises:
        ModelNotFoundError: there is no such model.
        UnsupportedModelError: it cannot be loaded, or its layers cannot be read.
        InvalidParameterError: there is no layer of a given number.
    """
    location = locate_files(name, role)
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
            model, report = load_checkpoint(
                AutoModelForCausalLM,
                location,
                config,
                role,
                name,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
            check_complete(report, model.config, role, name)
    except (ValueError, OSError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedModelError(
            role, f"{name!r} cannot be loaded for training: {reason[0]}"
        ) from error
    blocks = getattr(model.base_model, "layers", ())
    return Teacher(model.to(device), layers(len(blocks)), role)
