"""A causal language model that computes packed tokens of many requests in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftwise.errors import DraftwiseError, NumericalError, UnsupportedModelError
from draftwise.models.attention import ATTENTION_NAME, Segment, ShapeProbe, pack
from draftwise.models.forward import ForwardPass, forward_pass
from draftwise.models.kv_cache import KVCache, LayerShape

# Relative error allowed between this forward pass and the model's own, by type.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
_PROBE_LENGTH = 12


class PackedModel:
    """A Hugging Face causal language model, run on packed tokens.

    Attributes:
        role: ``"target"``, ``"draft"``, …; named in errors.
        vocab_size: width of the logits.
        dtype: type of the weights.
        device: where they are.
        layers: what each layer keeps per token.
    """

    def __init__(self, model: nn.Module, role: str, max_model_len: int) -> None:
        """Take over a loaded model.

        Raises:
            UnsupportedModelError: the model's own attention gives other logits than ours.
        """
        self.role = role
        self._model: Any = model.eval()
        parameter = next(model.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        ids = self._probe_ids(max_model_len)
        expected = self._own_logits(ids)
        self.vocab_size = expected.shape[-1]
        self.layers = self._learn_layers(ids, max_model_len)
        self._forward: ForwardPass = forward_pass(model)
        self._compare(ids[0], expected)

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        """A cache for ``num_rows`` requests of up to ``capacity`` tokens."""
        return KVCache(self.layers, num_rows, capacity, self.dtype, self.device)

    def forward(
        self,
        cache: KVCache,
        tokens: Sequence[int] | Tensor,
        segments: Sequence[Segment],
        logit_rows: Sequence[int] | None,
    ) -> Tensor | None:
        """Compute packed tokens, write their keys and values, advance the rows' lengths.

        Args:
            cache: this model's cache.
            tokens: ``[tokens]`` token ids, segment after segment.
            segments: ordered by row.
            logit_rows: which packed tokens' logits are wanted, or ``None`` for none: then the
                vocabulary projection is not computed at all.

        Returns:
            ``[len(logit_rows), vocab]``, or ``None`` if none were wanted or there are no tokens.
        """
        if not segments:
            return None
        packed = pack(cache, segments, self.dtype, self.device)
        ids = torch.as_tensor(tokens, dtype=torch.long, device=self.device)
        logits = self._forward(ids, packed, logit_rows)
        for row, start, count in segments:
            cache.advance(row, start + count)
        return logits

    @contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        """Turn whatever the model's own code raises into a refusal of the model."""
        try:
            yield
        except DraftwiseError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                self.role, f"{self._model.config.model_type} {what}: {error}"
            ) from error

    def _probe_ids(self, max_model_len: int) -> Tensor:
        """``[1, length]`` some tokens to try the model with."""
        length = min(_PROBE_LENGTH, max_model_len)
        generator = torch.Generator().manual_seed(0)
        size = self._model.get_input_embeddings().num_embeddings
        return torch.randint(0, size, (1, length), generator=generator).to(self.device)

    @torch.inference_mode()
    def _own_logits(self, ids: Tensor) -> Tensor:
        """``[length, vocab]`` float32, what the model computes by itself."""
        with self._refusing("fails by itself"):
            self._model.set_attn_implementation("eager")
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0].float()
        if not bool(logits.isfinite().any()):
            raise NumericalError(self.role, "its weights give logits that are not numbers")
        return logits

    @torch.inference_mode()
    def _learn_layers(self, ids: Tensor, max_model_len: int) -> list[LayerShape]:
        """What each layer keeps per token; refuses attention that is computed differently."""
        positions = torch.arange(ids.shape[1], device=self.device).unsqueeze(0)
        probe = ShapeProbe(self.role, max_model_len)
        with self._refusing("does not take packed tokens"):
            self._model.set_attn_implementation(ATTENTION_NAME)
            self._model(input_ids=ids, position_ids=positions, use_cache=False, packed=probe)
        if sorted(probe.layers) != list(range(len(probe.layers))) or not probe.layers:
            raise UnsupportedModelError(
                self.role,
                f"{self._model.config.model_type} does not attend through exchangeable attention",
            )
        return [probe.layers[index] for index in range(len(probe.layers))]

    @torch.inference_mode()
    def _compare(self, tokens: Tensor, expected: Tensor) -> None:
        """Two requests, computed in two pieces, must give what the model gives in one."""
        length = len(tokens)
        cache = self.new_cache(2, length)
        half = length // 2
        pieces = [(0, half), (half, length)] if half else [(0, length)]
        logits = []
        for start, end in pieces:
            count = end - start
            segments = [Segment(0, start, count), Segment(1, start, count)]
            # Last first: a model that ignores which logits are wanted is found out.
            rows = list(range(2 * count))[::-1]
            with self._refusing("does not take packed tokens"):
                part = self.forward(cache, tokens[start:end].repeat(2), segments, rows)
            assert part is not None
            logits.append(part.flip(0).view(2, count, -1).float())
        actual = torch.cat(logits, dim=1)
        finite = expected.isfinite()
        scale = expected[finite].std().clamp(min=1e-6)
        # By position: among so many logits the largest rounding error of bfloat16 is far out.
        errors = torch.where(finite, actual - expected, 0.0).square().mean(dim=-1).sqrt()
        deviation = (errors.max() / scale).item()
        if not deviation <= _TOLERANCE.get(self.dtype, 0.1):
            raise UnsupportedModelError(
                self.role,
                f"{self._model.config.model_type} gives other logits when computed in packed form "
                f"(relative error {deviation:.2g}); something in it is not plain causal attention",
            )
