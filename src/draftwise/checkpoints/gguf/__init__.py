"""Models in GGUF files.

A model's configuration is built from the file's metadata as llama.cpp reads it
(:mod:`draftwise.checkpoints.gguf.configuration`). Where the native kernels compute the model, its
weights stay in the blocks of the file; otherwise they are expanded
(:mod:`draftwise.checkpoints.gguf.weights`). A key or a tensor that is not used is refused by name.
"""

from draftwise.checkpoints.gguf.configuration import read_configuration
from draftwise.checkpoints.gguf.file import GgufFile
from draftwise.checkpoints.gguf.file_names import find_gguf, is_gguf
from draftwise.checkpoints.gguf.tokenizer import load_tokenizer
from draftwise.checkpoints.gguf.weights import (
    load_mtp,
    load_stored,
    load_weights,
    num_mtp_layers,
    reads_mtp,
)

__all__ = [
    "GgufFile",
    "find_gguf",
    "is_gguf",
    "load_mtp",
    "load_stored",
    "load_tokenizer",
    "load_weights",
    "num_mtp_layers",
    "read_configuration",
    "reads_mtp",
]
