"""Draftwise: lossless, batched speculative decoding for Hugging Face models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from draftwise.openmp import set_defaults

if TYPE_CHECKING:
    from draftwise.llm import LLM
    from draftwise.outputs import RequestOutput
    from draftwise.params import SamplingParams
    from draftwise.speculation import RequestSpeculation, SpeculationConfig
    from draftwise.structured_outputs import StructuredOutputs

__all__ = [
    "LLM",
    "RequestOutput",
    "RequestSpeculation",
    "SamplingParams",
    "SpeculationConfig",
    "StructuredOutputs",
]
__version__ = "0.3.0"

set_defaults()

_HOME = {
    "LLM": "draftwise.llm",
    "RequestOutput": "draftwise.outputs",
    "RequestSpeculation": "draftwise.speculation",
    "SamplingParams": "draftwise.params",
    "SpeculationConfig": "draftwise.speculation",
    "StructuredOutputs": "draftwise.structured_outputs",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `draftwise --help` does not import PyTorch.
    if name not in _HOME:
        raise AttributeError(f"module 'draftwise' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
