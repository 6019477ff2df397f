"""What the modules of ``transformers`` compute for a text, in one pass and without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Where models that also read images or sounds keep a language model of their own.
_LANGUAGE_MODELS = ("language_model", "text_model", "thinker", "text_decoder")

_TEXT = torch.tensor([[3, 4]])


class Reference:
    """A model of ``transformers``, by its log-probabilities.

    Attributes:
        text: the part of the model that reads and writes texts; mostly the whole.
        vocab: number of tokens of texts.
        padding: tokens that stand for nothing, and which some models do not count as positions.
    """

    def __init__(self, model: Any) -> None:
        """Take the model in float32.

        Raises:
            ValueError: it gives other logits for the same text each time.
            Exception: what the model raises for a text alone.
        """
        self._model = model.eval()
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.text = self._find_text_part()
        known: int = self.text.get_input_embeddings().num_embeddings
        logits = self.logits(_TEXT)
        if not torch.equal(logits, self.logits(_TEXT)):
            raise ValueError("it gives other logits for the same text each time")
        self.vocab = min(known, logits.shape[-1])
        padding = self._model.config.get_text_config().pad_token_id
        self.padding = () if padding is None else (int(padding),)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """``[prompts, tokens, vocab]`` logits for ``[prompts, tokens]`` ids."""
        return _logits(self.text, ids)

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """``[tokens, vocab]`` log-probabilities of the token after each of a text."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = self.logits(torch.tensor([key]))[0].log_softmax(dim=-1)
        return self._known[key]

    @torch.no_grad()
    def _find_text_part(self) -> Any:
        """The model itself, or its language model if it does not run on a text alone."""
        parts = [getattr(self._model, name, None) for name in _LANGUAGE_MODELS]
        failure: Exception | None = None
        for part in [self._model, *(each for each in parts if each is not None)]:
            try:
                _logits(part, _TEXT)
            except Exception as error:
                failure = failure or error
            else:
                return part
        assert failure is not None
        raise failure


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()
