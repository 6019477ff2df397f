"""Every error a user can cause, each naming the field at fault and the remedy.

All of them derive from :class:`DraftwiseError`, carry the offending ``field`` and end a command
with exit status 2. An error of one request never ends another request of the same batch.
"""

from __future__ import annotations


class DraftwiseError(Exception):
    """Base of all errors raised on purpose.

    Attributes:
        field: name of the argument, file or model role at fault, for example ``"temperature"``.
        message: what is wrong and what to do about it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[DraftwiseError], tuple[str, str]]:
        return type(self), (self.field, self.message)


class InvalidParameterError(DraftwiseError, ValueError):
    """A parameter has a value outside its range, or a key that does not exist."""


class ModelNotFoundError(DraftwiseError):
    """A model name, folder or hub id leads to no model."""


class UnsupportedModelError(DraftwiseError):
    """A model exists but its architecture or a setting of it cannot be served correctly."""


class VocabularyMismatchError(DraftwiseError):
    """Two models that must share a vocabulary do not."""


class PromptError(DraftwiseError, ValueError):
    """A prompt is empty, malformed, or longer than the context."""


class CacheExhaustedError(DraftwiseError):
    """A request needs more key-value cache than the engine has in total."""


class NumericalError(DraftwiseError):
    """A model produced logits that are not numbers."""


class EngineError(DraftwiseError):
    """A step of the engine failed, which ended all requests that it served at that time."""


class ClosedError(DraftwiseError):
    """An ``LLM`` or an engine is used after it was closed."""


class ReplicaError(DraftwiseError):
    """A replica of the draft in another process is gone, or not what it should be."""


class PeerError(DraftwiseError):
    """Another engine in a benchmark could not be started or failed; ``field`` is its name."""


class DraftwiseWarning(UserWarning):
    """Something is likely not as the user thinks, and goes on all the same."""
