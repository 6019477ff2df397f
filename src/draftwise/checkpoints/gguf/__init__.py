"""Models in GGUF files.

A model's configuration is built from the file's metadata as llama.cpp reads it
(:mod:`draftwise.checkpoints.gguf.configuration`). Its weights are expanded
(:mod:`draftwise.checkpoints.gguf.weights`). The native kernels compute with the integers and scales
of the file's blocks (:mod:`draftwise.checkpoints.gguf.blocks`). A key or a tensor that is not used
is refused by name.
"""

from draftwise.checkpoints.gguf.configuration import read_configuration
from draftwise.checkpoints.gguf.file import GgufFile
from draftwise.checkpoints.gguf.file_names import find_gguf, is_gguf
from draftwise.checkpoints.gguf.tokenizer import load_tokenizer
from draftwise.checkpoints.gguf.weights import keep_blocks, load_weights

__all__ = [
    "GgufFile",
    "find_gguf",
    "is_gguf",
    "keep_blocks",
    "load_tokenizer",
    "load_weights",
    "read_configuration",
]
