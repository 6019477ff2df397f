"""Request bodies in OpenAI's format, with the extensions of vLLM."""

from draftwise.serving.schemas.chat import ChatBody, Message
from draftwise.serving.schemas.common import Sampling, StreamOptions
from draftwise.serving.schemas.completions import CompletionBody
from draftwise.serving.schemas.operations import (
    DetokenizeBody,
    SpeculationChange,
    TokenizeBody,
)

__all__ = [
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "Message",
    "Sampling",
    "SpeculationChange",
    "StreamOptions",
    "TokenizeBody",
]
