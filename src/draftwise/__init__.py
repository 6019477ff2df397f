"""Draftwise: lossless, batched speculative decoding for Hugging Face models."""

from draftwise.llm import LLM
from draftwise.outputs import RequestOutput
from draftwise.params import SamplingParams, SpeculationConfig

__all__ = ["LLM", "RequestOutput", "SamplingParams", "SpeculationConfig"]
__version__ = "0.1.0"
