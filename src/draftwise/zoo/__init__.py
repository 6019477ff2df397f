"""The bundled model family, the recipe it was trained with, and its inflation to larger sizes."""

from draftwise.zoo.registry import names, resolve

__all__ = ["names", "resolve"]
