"""Draftwise's C++ kernels for the CPU, and the Python code that calls them.

The sources are in ``source``. :mod:`draftwise.kernels.native.compilation` compiles them at first
use. :mod:`draftwise.kernels.native.library` loads the compiled library.
:mod:`draftwise.kernels.native.structures` declares the structures that both languages share.
"""
