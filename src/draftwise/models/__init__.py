"""Models: loading, checks of what can be served, and the forward pass over packed tokens."""

from draftwise.checkpoints.imports import quiet_import

with quiet_import():
    import transformers.modeling_utils  # noqa: F401
