import inspect
import pickle

from draftwise import errors
from draftwise.errors import DraftwiseError

CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, DraftwiseError)
]


def test_an_error_names_its_field():
    for cls in CLASSES:
        for error in (cls("a", "b"), pickle.loads(pickle.dumps(cls("a", "b")))):
            assert type(error) is cls
            assert (error.field, error.message, str(error)) == ("a", "b", "a: b")
        assert cls.__doc__


def test_list_of_errors():
    """Other tests check where each error is raised."""
    assert {cls.__name__ for cls in CLASSES} == {
        "CacheExhaustedError",
        "ClosedError",
        "DraftwiseError",
        "EngineError",
        "InvalidParameterError",
        "ModelNotFoundError",
        "NumericalError",
        "PeerError",
        "ReplicaError",
        "PromptError",
        "ServerError",
        "UnsupportedModelError",
        "VocabularyMismatchError",
    }
