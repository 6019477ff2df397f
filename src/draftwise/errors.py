"""Errors that users can cause. Each names the invalid field and the remedy.

All errors derive from :class:`DraftwiseError` and have a ``field``. On the command line they lead
to exit status 2. An error of one request never affects other requests of the batch.
"""

from __future__ import annotations


class DraftwiseError(Exception):
    """Base class of the errors of Draftwise.

    Attributes:
        field: name of the invalid argument, file or model role, for example ``"temperature"``.
        message: description of the error and its remedy.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def __reduce__(self) -> tuple[type[DraftwiseError], tuple[str, str]]:
        return type(self), (self.field, self.message)


class InvalidParameterError(DraftwiseError, ValueError):
    """A parameter is out of range or has an unknown key."""


class ModelNotFoundError(DraftwiseError):
    """There is no model with the given name, folder or hub id."""


class UnsupportedModelError(DraftwiseError):
    """A model exists, but its architecture or one of its settings is not supported."""


class VocabularyMismatchError(DraftwiseError):
    """Two models have no tokens in common, or their tokens cannot be compared."""


class PromptError(DraftwiseError, ValueError):
    """A prompt is empty, malformed, or longer than the context."""


class CacheExhaustedError(DraftwiseError):
    """A request needs more KV cache than the engine has in total."""


class NumericalError(DraftwiseError):
    """A model computed NaN logits, or training computed a gradient that is not finite."""


class EngineError(DraftwiseError):
    """A step of the engine failed, which ended all of its unfinished requests."""


class ClosedError(DraftwiseError):
    """An ``LLM`` or an engine was used after it was closed."""


class ReplicaError(DraftwiseError):
    """A process with a replica of the draft has ended, or its models do not match."""


class PeerError(DraftwiseError):
    """Another engine in a benchmark did not start or failed; ``field`` is its name."""


class ServerError(DraftwiseError):
    """A server that is audited does not respond, or refuses a request; ``field`` is its address.

    Attributes:
        status: HTTP status of the response; ``None`` without a response.
        command: command of a shell that repeats the request; empty if it asked for no answer.
    """

    status: int | None = None
    command: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the server failed, rather than that it refused the request."""
        return self.status is None or self.status >= 500


class DraftwiseWarning(UserWarning):
    """Draftwise continues, but likely not as the user expects."""


class SlowPathWarning(DraftwiseWarning):
    """A model is computed more slowly than others of its size; says why and by how much."""


class HeadTargetWarning(DraftwiseWarning):
    """A drafting head was trained for another target of the same sizes."""


class VocabularyWarning(DraftwiseWarning):
    """A draft or companion has another vocabulary than the target, and is translated."""
