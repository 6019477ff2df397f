from ..cli.conftest import draftwise

__all__ = ["draftwise"]
