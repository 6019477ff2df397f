"""Draftwise's policies inside other engines."""
