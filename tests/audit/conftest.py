import pytest

from draftwise.audit import sampling

from ..cli.conftest import draftwise

__all__ = ["draftwise"]


@pytest.fixture(scope="session", autouse=True)
def hardly_any_false_alarms():
    """A correct server fails once in a hundred audits, which is too often for tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "LEVEL", 1e-5)
        yield
