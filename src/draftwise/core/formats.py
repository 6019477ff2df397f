"""Names that a user can give beside those of models."""

# Integer weights of 8 or 4 bits. A user appends the format to a model name.
QUANTIZATIONS = ("int8", "int4")

# Drafts that need no model. They are also values of vLLM's ``method``.
MODEL_FREE_DRAFTS = ("ngram", "suffix")
