"""The ``draftwise`` command."""

from draftwise.cli.app import main

__all__ = ["main"]
