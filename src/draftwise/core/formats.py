"""Names that a user can give beside those of models."""

from typing import Literal

VerificationMethod = Literal["block", "token"]

# What a head that drafts blocks proposes where tokens are sampled.
PROPOSALS = ("one-hot", "sampled")

# Integer weights of 8 or 4 bits. A user appends the format to a model name.
QUANTIZATIONS = ("int8", "int4")

# Drafts that need no model. They are also values of vLLM's ``method``.
MODEL_FREE_DRAFTS = ("ngram", "suffix")

# Kinds of heads, which are also values of vLLM's ``method``.
HEAD_METHODS = ("eagle", "eagle3", "dflash", "dspark")

# vLLM's ``method`` for drafts of MTP layers of the target. Earlier names begin with the family.
MTP_METHOD = "mtp"

# Beginning of the names of the target's exits, ``target:exit=8``.
EXIT_PREFIX = "target:exit"


def is_mtp(name: str) -> bool:
    """Whether a name is one of vLLM's for drafts of MTP layers, such as ``"deepseek_mtp"``."""
    return name == MTP_METHOD or name.endswith(f"_{MTP_METHOD}")


def draft_parts(draft: str) -> tuple[str, ...]:
    """The drafts in a value such as ``"suffix,zoo:draft"``. A path may contain commas."""
    parts = tuple(part.strip() for part in draft.split(","))
    return parts if len(parts) > 1 and set(parts) & set(MODEL_FREE_DRAFTS) else (draft,)
