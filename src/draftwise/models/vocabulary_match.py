"""Whether a draft or companion shares the target's vocabulary, and how to translate if not."""

from __future__ import annotations

import warnings
from dataclasses import replace

from draftwise.errors import VocabularyMismatchError, VocabularyWarning
from draftwise.models.loading import LoadedModel
from draftwise.models.vocabulary_map import (
    TokenTranslator,
    is_same_vocabulary,
    probability_share,
)


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
