import inspect
import pickle

import pytest

from draftwise import errors
from draftwise.errors import DraftwiseError

CLASSES = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, DraftwiseError)
]


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_names_its_field(cls):
    error = cls("temperature", "is too high; use less")
    assert error.field == "temperature"
    assert error.message == "is too high; use less"
    assert str(error) == "temperature: is too high; use less"
    assert cls.__doc__


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_can_be_pickled(cls):
    error = pickle.loads(pickle.dumps(cls("a", "b")))
    assert type(error) is cls
    assert (error.field, error.message, str(error)) == ("a", "b", "a: b")


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
        "UnsupportedModelError",
        "VocabularyMismatchError",
    }
