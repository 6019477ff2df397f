"""Draft and companion models whose vocabulary is not the target's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from torch import Tensor

from draftwise.engine.cached_block_head import CachedBlockHead
from draftwise.engine.cached_head import CachedHead
from draftwise.engine.cached_model import CachedModel, ForwardInput, PackedInput
from draftwise.engine.cached_parallel_head import CachedParallelHead
from draftwise.engine.lifecycle import Commit
from draftwise.engine.request import Request
from draftwise.models.heads.block_model import BlockHeadModel
from draftwise.models.heads.model import HeadModel
from draftwise.models.heads.parallel_model import ParallelHeadModel
from draftwise.models.kv_cache import KVCache
from draftwise.models.loading import LoadedModel
from draftwise.models.packed_model import PackedModel
from draftwise.models.segment import Segment
from draftwise.models.vocabulary_map import TokenTranslator, VocabularyMap


def new_cached_model(loaded: LoadedModel, cache: KVCache, vocab_size: int) -> CachedModel:
    """Create the cached model of a draft or a companion.

    Args:
        loaded: the draft or the companion.
        cache: its cache, with the same slots as the target's.
        vocab_size: the target's vocabulary size.
    """
    if isinstance(loaded.model, ParallelHeadModel):
        return CachedParallelHead(loaded.model, cache, vocab_size)
    if isinstance(loaded.model, HeadModel):
        return CachedHead(loaded.model, cache, vocab_size)
    if isinstance(loaded.model, BlockHeadModel):
        return CachedBlockHead(loaded.model, cache, vocab_size)
    if loaded.translator is None:
        return CachedModel(loaded.model, cache, vocab_size)
    return TranslatedModel(loaded.model, cache, vocab_size, loaded.translator)


class MappedModel(CachedModel):
    """A model with ids of its own for the tokens that it shares with the target.

    Everybody else sees the target's ids. The logits of tokens that are not shared are −∞, so they
    are never drafted.
    """

    def __init__(
        self, model: PackedModel, cache: KVCache, vocab_size: int, vocabulary: VocabularyMap
    ) -> None:
        """Set up.

        Args:
            model: the draft or companion model.
            cache: its cache, with the same slots as the target's.
            vocab_size: the target's vocabulary size.
            vocabulary: the tokens that the model shares with the target.
        """
        super().__init__(model, cache, vocab_size)
        self._vocabulary = vocabulary.to(model.device)

    @property
    def native(self) -> None:
        """None: the kernels draft in the model's own ids."""
        return None

    def has_static_steps(self, num_tokens: int) -> bool:
        """False: recorded steps draft in the model's own ids."""
        return False

    def read_one(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """Read one more shared token per cache slot; returns ``[rows, vocab]`` logits."""
        return super().read_one(rows, self._vocabulary.own_tokens(tokens))

    def fit_vocabulary(self, logits: Tensor) -> Tensor:
        """The logits over the target's vocabulary."""
        return self._vocabulary.target_logits(logits)

    def _readable(self, tokens: Sequence[int]) -> Sequence[int]:
        """Own ids. Tokens that are not shared become token 0."""
        return [self._vocabulary.own_id(token) or 0 for token in tokens]


class TranslatedModel(MappedModel):
    """A model with another tokenizer than the target's.

    Its text of a request has other tokens than the target's, and usually another number of them.
    The prompt is tokenized anew. A token of the output that both share is one token of the text,
    and any other one is tokenized by itself.
    """

    def __init__(
        self, model: PackedModel, cache: KVCache, vocab_size: int, translator: TokenTranslator
    ) -> None:
        """Set up.

        Args:
            model: the draft or companion model.
            cache: its cache, with the same slots as the target's.
            vocab_size: the target's vocabulary size.
            translator: translates the target's tokens.
        """
        super().__init__(model, cache, vocab_size, translator.vocabulary)
        self._translator = translator
        # For each slot: the request's text in own tokens, and its length after the prompt and
        # after each token of the output.
        self._texts: list[list[int]] = [[] for _ in range(self.num_rows)]
        self._ends: list[list[int]] = [[0] for _ in range(self.num_rows)]

    def text(self, request: Request) -> Sequence[int]:
        """The request's prompt and output in own tokens."""
        slot = request.cache_slot
        text, ends = self._texts[slot], self._ends[slot]
        for token in request.tokens[request.num_prompt_tokens + len(ends) - 1 :]:
            text.extend(self._translator.token(token))
            ends.append(len(text))
        return text

    def text_end(self, request: Request, end: int) -> int:
        """A position in the text; within the prompt it is the proportional one."""
        self.text(request)
        ends, num_prompt_tokens = self._ends[request.cache_slot], request.num_prompt_tokens
        if end >= num_prompt_tokens:
            return ends[end - num_prompt_tokens]
        return ends[0] * end // num_prompt_tokens

    def room(self, request: Request) -> int:
        """Maximum number of tokens that fit after the text; 0 if there is no text to read."""
        length = len(self.text(request))
        return self.capacity - length if length else 0

    def num_scored(self, request: Request, drafted: Sequence[int]) -> int:
        """Number of leading drafted tokens whose logits this model can compute."""
        length = len(self.text(request))
        room = min(self.room(request), self.cache.max_new_tokens - 1)
        before = accumulate((len(self._translator.token(t)) for t in drafted[:-1]), initial=0)
        return sum(length > 0 and used <= room for used in before) if drafted else 0

    def num_own_tokens(self, drafted: Sequence[int]) -> int:
        """Number of own tokens that stand for drafted tokens of the target."""
        return sum(len(self._translator.token(token)) for token in drafted)

    def admit(self, request: Request) -> None:
        """Clear the request's cache slot, and tokenize its prompt."""
        super().admit(request)
        text = self._translator.prompt(request.tokens[: request.num_prompt_tokens])
        self._texts[request.cache_slot], self._ends[request.cache_slot] = text, [len(text)]

    def commit(self, commit: Commit) -> None:
        """Roll back the tokens that were read and not accepted."""
        for request, start, num_drafted in zip(
            commit.requests, commit.starts, commit.num_drafted, strict=True
        ):
            slot, count = request.cache_slot, len(request.tokens)
            if count > start:
                accepted = min(count - 1, start + num_drafted)
                self._roll_back(slot, self.text_end(request, accepted))
            self._committed[slot] = self.cache.lengths[slot]

    def recover(self, requests: Iterable[Request]) -> None:
        """Roll back to the last commit."""
        for request in requests:
            self._roll_back(request.cache_slot, self._committed[request.cache_slot])

    def gather(self, inputs: Iterable[ForwardInput]) -> PackedInput:
        """Packed own tokens, their segments in order of cache slot, and the rows of the logits."""
        inputs, cache = list(inputs), self.cache
        for request, end, _, num_logits, _ in inputs:
            # The last token is read again if the newest ones of the target have no counterpart.
            if num_logits:
                cache.roll_back(request.cache_slot, self.text_end(request, end) - 1)
        self._catch_up(inputs)
        tokens: list[int] = []
        segments: list[Segment] = []
        rows: list[int] = []
        for request, end, drafted, num_logits, _ in sorted(
            inputs, key=lambda r: r.request.cache_slot
        ):
            start = cache.lengths[request.cache_slot]
            new = [*self.text(request)[start : min(self.text_end(request, end), self.capacity)]]
            ends = [len(new)]
            for token in drafted:
                new += self._translator.token(token)
                ends.append(len(new))
            if num_logits:
                rows.extend(len(tokens) + each - 1 for each in ends[-num_logits:])
            if new:
                tokens.extend(new)
                segments.append(Segment(request.cache_slot, start, len(new)))
        return PackedInput(tokens, segments, rows)

    def _readable(self, tokens: Sequence[int]) -> Sequence[int]:
        """The tokens, which are the model's own already."""
        return tokens
