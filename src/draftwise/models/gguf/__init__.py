"""Models in GGUF files.

A model's configuration is built from the file's metadata as llama.cpp reads it
(:mod:`draftwise.models.gguf.configuration`). Its weights are expanded
(:mod:`draftwise.models.gguf.weights`). The native kernels compute with the integers and scales of
the file's blocks (:mod:`draftwise.models.gguf.blocks`). A key or a tensor that is not used is
refused by name.
"""

from draftwise.models.gguf.configuration import read_configuration
from draftwise.models.gguf.file import GgufFile
from draftwise.models.gguf.file_names import find_gguf, is_gguf
from draftwise.models.gguf.tokenizer import load_tokenizer
from draftwise.models.gguf.weights import keep_blocks, load_weights

__all__ = [
    "GgufFile",
    "find_gguf",
    "is_gguf",
    "keep_blocks",
    "load_tokenizer",
    "load_weights",
    "read_configuration",
]
