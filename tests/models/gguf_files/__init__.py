"""Tiny models in GGUF files, one for each metadata key that changes what a model computes.

A :class:`Case` is a base file of its architecture with a few keys or tensors changed. ``make``
writes its file, the same on every machine. ``make_vocabulary`` writes one that splits texts in a
way that a file can name. llama.cpp's values for all cases are recorded in
``gguf_reference.json`` by ``python tools/gguf_reference``; ``recorded`` returns them.

Needs NumPy and ``gguf`` only.
"""

from collections.abc import Mapping

from .case import Case
from .gemma import GEMMA
from .llama import LLAMA
from .mixtures import MIXTURES
from .others import OTHERS
from .qwen import QWEN
from .splits import NAMES, TEXTS, make_vocabulary
from .vocabularies import VOCABULARIES
from .writing import make, recorded, tokens

# Log-probabilities of the tokens are recorded; of ``VOCABULARIES``, the tokens that end a text.
CASES: Mapping[str, Case] = {**LLAMA, **QWEN, **MIXTURES, **GEMMA, **OTHERS}

__all__ = [
    "CASES",
    "NAMES",
    "TEXTS",
    "VOCABULARIES",
    "Case",
    "make",
    "make_vocabulary",
    "recorded",
    "tokens",
]
