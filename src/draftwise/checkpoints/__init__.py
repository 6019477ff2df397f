"""What a model's files say: names and folders, configurations, tensors, tokenizers.

Nothing here computes with a model. :mod:`draftwise.models` does, and
:mod:`draftwise.models.loading` joins the two.
"""

from draftwise.checkpoints.imports import quiet_import

with quiet_import():
    import transformers.modeling_utils  # noqa: F401
