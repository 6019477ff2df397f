"""Models in GGUF files.

``transformers`` reads the configuration, the tokenizer and the weights, which it expands. The
native kernels compute with the integers and scales of the file's blocks
(:mod:`draftwise.models.gguf.blocks`).
"""

from draftwise.models.gguf.file import GgufFile
from draftwise.models.gguf.names import find_gguf, is_gguf

__all__ = ["GgufFile", "find_gguf", "is_gguf"]
