"""The bundled model family, its training recipe, and its inflation to larger sizes."""

from draftwise.zoo.bundled import PREFIX, names, resolve

__all__ = ["PREFIX", "names", "resolve"]
