"""Models: what is computed, and the caches. :mod:`draftwise.models.loading` loads them."""

import draftwise.checkpoints  # noqa: F401  # it imports transformers without messages
