"""Draftwise's C++ kernels for the CPU, and the Python code that calls them.

The sources are in ``source``. :mod:`draftwise.models.native.compilation` compiles them at first
use. :mod:`draftwise.models.native.library` loads the compiled library.
:mod:`draftwise.models.native.structures` declares the structures that both languages share.
"""
